"""The processes of jax.distributed as a group, which exchanges bytes through the coordinator's key-value store.

The collectives of jax are avoided: they compile a program, run on the devices, and would need the same order relative to the
training's collectives on every process. The client of the key-value store has no public name (orbax uses the same private one).
Where a release of jax does not have it, the group uses the collectives.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from ckpt.errors import GroupError
from ckpt.groups.base import GROUP_TIMEOUT_SECONDS, Group, timeout_error
from ckpt.storage.base.errors import first_line
from ckpt.storage.base.forks import fork_safe_lock

_gather_numbers = itertools.count()  # shared by all JaxGroup objects of the process, so that no key is used twice


class JaxGroup(Group):
    """The processes of jax.distributed. timeout: seconds to wait for the other processes."""

    name = "jax.distributed"

    def __init__(self, timeout: float = GROUP_TIMEOUT_SECONDS) -> None:
        self._timeout = timeout
        state = _distributed_state()
        self._client: Any = getattr(state, "client", None)
        if self._client is not None:  # without starting the backend
            self.rank, self.size = state.process_id, state.num_processes
        else:
            import jax

            self.rank, self.size = jax.process_index(), jax.process_count()
        self.has_network_notes = self._client is not None

    def all_gather(self, data: bytes) -> list[bytes]:
        with self._as_group_error("a gather"):
            if self._client is None:
                return self._gather_on_devices(data)
            number = next(_gather_numbers)
            self._client.key_value_set_bytes(_gather_key(number, self.rank), data)
            until = time.monotonic() + self._timeout
            got = [self._wait_for_part(number, rank, until) for rank in range(self.size)]
            # All ranks have joined this gather, so all have finished the previous one and its key is not needed any more.
            self._client.key_value_delete(_gather_key(number - 1, self.rank))
            return got

    def _wait_for_part(self, number: int, rank: int, until: float) -> bytes:
        left = max(1, int(1000 * (until - time.monotonic())))
        try:
            data: bytes = self._client.blocking_key_value_get_bytes(_gather_key(number, rank), left)
        except RuntimeError as error:
            others = (r for r in range(self.size) if r != self.rank)
            missing = [r for r in others if not self._has_key(_gather_key(number, r))]
            if not missing or "DEADLINE_EXCEEDED" not in str(error):
                raise GroupError(
                    f"{self!r}: the data of rank {rank} in a gather could not be read: {first_line(error)}; "
                    "check whether the coordinator (process 0) has died, and restart the job"
                ) from error
            raise timeout_error(self, missing, "a gather", self._timeout) from error
        return data

    def _leave_network_note(self, key: str, note: bytes) -> None:
        self._client.key_value_set_bytes(f"ckpt/note/{key}", note)

    def _network_note(self, key: str) -> bytes | None:
        try:
            return bytes(self._client.blocking_key_value_get_bytes(f"ckpt/note/{key}", 10))
        except RuntimeError:  # no such key after 10 ms
            return None

    def _has_key(self, key: str) -> bool:
        try:
            self._client.blocking_key_value_get_bytes(key, 10)
        except RuntimeError:
            return False
        return True

    def _gather_on_devices(self, data: bytes) -> list[bytes]:
        from jax.experimental.multihost_utils import process_allgather

        # int32, since jax has no wider integers without jax_enable_x64.
        lengths = process_allgather(np.array([len(data)], np.int32)).reshape(self.size).tolist()
        mine = np.zeros(max(1, *lengths), np.uint8)  # padded to the same shape on all processes
        mine[: len(data)] = np.frombuffer(data, np.uint8)
        rows = process_allgather(mine).reshape(self.size, -1)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


_groups: dict[int, JaxGroup] = {}
"""The group of the current client of jax.distributed, by the id of that client, which the group keeps alive."""

_groups_lock = fork_safe_lock()
"""Guards changes of `_groups`."""


def current_group() -> JaxGroup:
    """Return the group of all processes: the same object until jax.distributed is initialised again.

    A writer session belongs to one group object, so with another object each save would begin a session of its own.
    """
    client = id(getattr(_distributed_state(), "client", None))
    with _groups_lock:
        if client not in _groups:
            _groups.clear()
            _groups[client] = JaxGroup()
        return _groups[client]


def process_count() -> int:
    """Return the number of processes of jax.distributed, 0 if it is not initialised. Starts no backend."""
    state = _distributed_state()
    if state is not None:
        return int(state.num_processes) if state.client is not None else 0
    import jax

    return int(jax.process_count()) if jax.distributed.is_initialized() else 0


def _distributed_state() -> Any:
    """Return the private state of jax.distributed, None if this release of jax does not have it."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return global_state


def _gather_key(number: int, rank: int) -> str:
    return f"ckpt/{number}/{rank}"
