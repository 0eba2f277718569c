"""A torch.distributed process group as a group. It sends tensors of bytes and no pickled objects.

The timeout of the process group limits how long a rank waits for the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt.groups.base import MESSAGE_PIECE_BYTES, Group, Message
from ckpt.storage.base.store import Store

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    import torch.distributed as dist


class TorchGroup(Group):
    """The ranks of a torch.distributed process group; None is the default one."""

    name = "torch.distributed"
    has_network_notes = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        import torch
        import torch.distributed as dist

        # A weak reference: a process group that the user destroys must be freed, or its threads live on and may abort the
        # process at exit.
        self._group_reference = weakref.ref(dist.group.WORLD if group is None else group)
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        # Messages are addressed by global ranks, also in a subgroup.
        self._global_ranks = dist.get_process_group_ranks(self._group)
        kinds = _device_kinds(self._group)
        kind = "cpu" if "cpu" in kinds else kinds[0]
        # The program has set the current device of a rank, which the collectives of the training need too.
        index = None if kind == "cpu" else torch.get_device_module(kind).current_device()
        self._device = torch.device(kind, index)
        # Messages through the device would use its memory, and slow down the training.
        self.can_exchange = kind == "cpu"
        self._has_met = False

    @property
    def _group(self) -> dist.ProcessGroup:
        found = self._group_reference()
        if found is None:
            raise ValueError("the process group was destroyed")  # `_as_group_error` turns it into GroupError
        return found

    def meet_at(self, store: Store) -> None:
        """Wait for all ranks once, by the monitored barrier of gloo, the only call whose error names the missing ranks."""
        import torch.distributed as dist

        if self._has_met:
            return
        with self._as_group_error("the rendezvous"):
            if dist.get_backend(self._group) == dist.Backend.GLOO and (limit := _gloo_timeout(self._group)) is not None:
                dist.monitored_barrier(self._group, limit, wait_all_ranks=True)
        self._has_met = True

    def all_gather(self, data: bytes) -> list[bytes]:
        import torch
        import torch.distributed as dist

        with self._as_group_error("a gather"):
            mine = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
            gathered = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(gathered, mine, group=self._group)
            lengths = [int(length) for length in gathered]
            if not max(lengths):
                return [b""] * self.size
            # All are padded to the longest, since not every backend gathers different lengths.
            mine = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
            if data:
                mine[: len(data)] = _as_tensor(memoryview(data))
            gathered = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(gathered, mine, group=self._group)
            return [bytes(g[:n].cpu().numpy()) for g, n in zip(gathered, lengths, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        import torch
        import torch.distributed as dist

        mine = self._broadcast_input(data)
        with self._as_group_error("a broadcast"):
            length = torch.tensor([len(mine)], dtype=torch.int64, device=self._device)
            dist.broadcast(length, self._global_ranks[0], group=self._group)
            if not int(length):
                return b""
            got = torch.empty(int(length), dtype=torch.uint8, device=self._device)
            if mine:
                got[:] = _as_tensor(memoryview(mine))
            dist.broadcast(got, self._global_ranks[0], group=self._group)
            return bytes(got.cpu().numpy())

    def _leave_network_note(self, key: str, note: bytes) -> None:
        _key_value_store().set(f"ckpt/note/{key}", note)

    def _network_note(self, key: str) -> bytes | None:
        store, name = _key_value_store(), f"ckpt/note/{key}"
        return bytes(store.get(name)) if store.check([name]) else None

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        import torch.distributed as dist

        with self._as_group_error("an exchange"):
            operations = [
                dist.P2POp(call, piece, self._global_ranks[peer], self._group)
                for call, messages in ((dist.irecv, receive), (dist.isend, send))
                for peer, data in messages
                for piece in _as_tensor(data).split(MESSAGE_PIECE_BYTES)
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()


def _key_value_store() -> dist.Store:
    """Return the key-value store by which torch.distributed was initialised. It has no public name."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def _gloo_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a gloo process group; None if this version of torch does not expose it."""
    import torch

    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def _device_kinds(group: dist.ProcessGroup) -> list[str]:
    """Return the kinds of device of a process group, such as cpu and cuda for "cpu:gloo,cuda:nccl"."""
    import torch.distributed as dist

    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


def _as_tensor(data: memoryview) -> torch.Tensor:
    """Return the same memory as a tensor, or a copy if it is read-only, since torch has no read-only tensors."""
    import torch

    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
