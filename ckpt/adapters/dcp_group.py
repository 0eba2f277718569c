"""The group of the ranks of one dcp.save."""

from __future__ import annotations

from ckpt.errors import GroupError
from ckpt.groups.base import Group


class PlannedGroup(Group):
    """The ranks of one dcp.save. The message of rank 0 at the start of a session travels in the plan of DCP."""

    name = "torch.distributed.checkpoint"
    can_gather = False

    def __init__(self, rank: int, size: int, session_message: bytes = b"", step: int = 0) -> None:
        self.rank, self.size, self.session_message, self.step = rank, size, session_message, step

    def broadcast(self, data: bytes | None) -> bytes:
        if self.rank == 0:
            self.session_message = self._broadcast_input(data)
        return self.session_message

    def all_gather(self, data: bytes) -> list[bytes]:
        raise GroupError(f"{self!r} can't gather from all ranks")
