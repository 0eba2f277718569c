"""The processes of jax.distributed as a group.

Bytes go through the key-value store of its coordinator: jax's own collectives would compile a program, run on the
devices, and must not meet the training's in another order on another process. The client of that store has no public
name (orbax takes it from the same place); where a release of jax has none, the collectives do it after all.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from ckpt.errors import GroupError
from ckpt.groups.base import TIMEOUT_SECONDS, Group, timeout_error
from ckpt.storage.base.errors import first_line

_gather_numbers = itertools.count()  # of the gathers of this process, whatever objects make them: keys are never used twice


class JaxGroup(Group):
    """The processes of jax.distributed. `timeout`: seconds to wait for the others."""

    name = "jax.distributed"

    def __init__(self, timeout: float = TIMEOUT_SECONDS) -> None:
        self._timeout = timeout
        state = _distributed_state()
        self._client: Any = getattr(state, "client", None)
        if self._client is not None:  # and do not start the backend only to ask who is there
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
            # All have come to this gather, so all have left the one before and nobody needs it any more.
            self._client.key_value_delete(_gather_key(number - 1, self.rank))
            return got

    def _wait_for_part(self, number: int, rank: int, until: float) -> bytes:
        left = max(1, int(1000 * (until - time.monotonic())))
        try:
            data: bytes = self._client.blocking_key_value_get_bytes(_gather_key(number, rank), left)
        except RuntimeError as error:
            missing = [r for r in range(self.size) if not self._has_key(_gather_key(number, r))]
            if not missing or "DEADLINE_EXCEEDED" not in str(error):
                raise GroupError(
                    f"{self!r}: what rank {rank} gave to a gather could not be read: {first_line(error)}; "
                    "see whether the coordinator (process 0) has died, and restart the job"
                ) from error
            raise timeout_error(self, missing, "a gather", self._timeout) from error
        return data

    def _leave_network_note(self, key: str, note: bytes) -> None:
        self._client.key_value_set_bytes(f"ckpt/note/{key}", note)

    def _network_note(self, key: str) -> bytes | None:
        try:
            return bytes(self._client.blocking_key_value_get_bytes(f"ckpt/note/{key}", 10))
        except RuntimeError:  # not there within 10 ms
            return None

    def _has_key(self, key: str) -> bool:
        try:
            self._client.blocking_key_value_get_bytes(key, 10)
        except RuntimeError:
            return False
        return True

    def _gather_on_devices(self, data: bytes) -> list[bytes]:
        from jax.experimental.multihost_utils import process_allgather

        # int32: without jax_enable_x64 there is nothing wider.
        lengths = process_allgather(np.array([len(data)], np.int32)).reshape(self.size).tolist()
        mine = np.zeros(max(1, *lengths), np.uint8)  # padded: the same shape on all
        mine[: len(data)] = np.frombuffer(data, np.uint8)
        rows = process_allgather(mine).reshape(self.size, -1)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def process_count() -> int:
    """How many processes jax.distributed was initialised with, 0 where it was not. Starts no backend."""
    state = _distributed_state()
    if state is not None:
        return int(state.num_processes) if state.client is not None else 0
    import jax

    return int(jax.process_count()) if jax.distributed.is_initialized() else 0


def _distributed_state() -> Any:
    """What jax.distributed knows, None where this release keeps it elsewhere."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return global_state


def _gather_key(number: int, rank: int) -> str:
    return f"ckpt/{number}/{rank}"
