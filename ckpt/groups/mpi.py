"""An mpi4py communicator as a group. It sends buffers and no pickled objects.

MPI has no timeouts: if a rank dies, the launcher ends the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt.groups.base import MESSAGE_PIECE_BYTES, Group, Message

if TYPE_CHECKING:
    from mpi4py import MPI

_MESSAGE_TAG, _NOTE_TAG = 0, 1
"""MPI tags of messages and of notes."""


class MpiGroup(Group):
    """The ranks of an mpi4py intracommunicator."""

    name = "MPI"
    can_exchange = True

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()
        self._user_communicator = communicator
        self._duplicate: MPI.Intracomm | None = None
        self._received_notes: dict[str, bytes] = {}
        """The notes of other ranks, by key. Only the thread of a note changes it; there is one at a time."""
        self._pending_sends: list[MPI.Request] = []
        """The sends of notes that have not ended, with their data. Changed like `_received_notes`."""
        self.has_network_notes = _is_thread_multiple()

    def _communicator(self) -> MPI.Intracomm:
        """Return a duplicate of the user's communicator, in which the user's receives cannot take messages of ckpt.

        It is created by the first collective call, since creating it is collective: rank and size are available before.
        """
        if self._duplicate is None:
            from mpi4py import MPI

            self._duplicate = self._user_communicator.Dup()
            self._duplicate.Set_errhandler(MPI.ERRORS_RETURN)  # errors become exceptions, whatever the user has set
        return self._duplicate

    def all_gather(self, data: bytes) -> list[bytes]:
        with self._as_group_error("a gather"):
            communicator = self._communicator()
            lengths = np.empty(self.size, np.int64)
            communicator.Allgather(np.array([len(data)], np.int64), lengths)
            parts: list[list[bytes]] = [[] for _ in range(self.size)]
            piece = max(1, MESSAGE_PIECE_BYTES // self.size)  # bytes of each rank in one round
            for start in range(0, int(lengths.max()), piece):
                counts = np.clip(lengths - start, 0, piece)
                ends = np.cumsum(counts)
                got = np.empty(int(ends[-1]), np.uint8)
                mine = np.frombuffer(data, np.uint8)[start : start + piece]
                communicator.Allgatherv(mine, [got, counts.tolist(), (ends - counts).tolist(), _byte_type()])
                for part, end, count in zip(parts, ends, counts, strict=True):
                    part.append(got[end - count : end].tobytes())
            return [b"".join(part) for part in parts]

    def broadcast(self, data: bytes | None) -> bytes:
        mine = self._broadcast_input(data)
        with self._as_group_error("a broadcast"):
            communicator = self._communicator()
            length = np.array([len(mine)], np.int64)
            communicator.Bcast(length)
            got = np.empty(int(length[0]), np.uint8)
            if self.rank == 0:
                got[:] = np.frombuffer(mine, np.uint8)
            for piece in _split_message(got.data):
                communicator.Bcast([piece, _byte_type()])
            return got.tobytes()

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        from mpi4py import MPI

        with self._as_group_error("an exchange"):
            communicator = self._communicator()
            # Messages of one tag between two ranks do not overtake each other (MPI 4.1, section 3.5).
            requests = [
                communicator.Irecv([piece, MPI.BYTE], peer, _MESSAGE_TAG)
                for peer, data in receive
                for piece in _split_message(data)
            ]
            requests += [
                communicator.Isend([piece, MPI.BYTE], peer, _MESSAGE_TAG)
                for peer, data in send
                for piece in _split_message(data)
            ]
            MPI.Request.Waitall(requests)

    def _leave_network_note(self, key: str, note: bytes) -> None:
        from mpi4py import MPI

        if self._duplicate is None or MPI.Is_finalized():  # without a duplicate yet: creating it is collective
            return
        data = len(key.encode()).to_bytes(4, "little") + key.encode() + note
        self._pending_sends = [request for request in self._pending_sends if not request.Test()]
        self._pending_sends += [
            self._duplicate.Isend([data, _byte_type()], peer, _NOTE_TAG) for peer in range(self.size) if peer != self.rank
        ]

    def _network_note(self, key: str) -> bytes | None:
        from mpi4py import MPI

        status = MPI.Status()
        if self._duplicate is None or MPI.Is_finalized():
            return None
        while (message := self._duplicate.Improbe(MPI.ANY_SOURCE, _NOTE_TAG, status)) is not None:
            data = bytearray(status.Get_count(_byte_type()))
            message.Recv([data, _byte_type()])
            end = 4 + int.from_bytes(data[:4], "little")
            self._received_notes[data[4:end].decode()] = bytes(data[end:])
        return self._received_notes.get(key)

    def close(self) -> None:
        from mpi4py import MPI

        own, self._duplicate = self._duplicate, None
        if own is not None and not MPI.Is_finalized():
            own.Free()


def _is_thread_multiple() -> bool:
    """Return whether several threads may call MPI at once. Notes need it, because a background thread of a save reads them."""
    from mpi4py import MPI

    return MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _byte_type() -> MPI.Datatype:
    from mpi4py import MPI

    return MPI.BYTE


def _split_message(data: memoryview) -> list[memoryview]:
    return [data[start : start + MESSAGE_PIECE_BYTES] for start in range(0, len(data), MESSAGE_PIECE_BYTES)]
