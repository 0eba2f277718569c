"""What the pipelines need of ranks that work together: who is there, and two ways to hand bytes over.

The calls that say "collective" are made by every rank, in the same order, or none returns. A save makes none of them: a
dead or slow rank can't hold the others up.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ckpt.errors import GroupError
from ckpt.groups import host_notes
from ckpt.storage.base.errors import InvalidArgument, StoreError, first_line
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

Message = tuple[int, memoryview]
"""The other rank, and the bytes to send or the memory to fill."""

TIMEOUT_SECONDS = 600.0
"""How long a rank waits for the others where the group's own library has no limit. The first save of a large job comes
after every rank has compiled and loaded its model, which takes minutes and not the same for all."""

_NOTE_SECONDS = 2.0
"""How long a call waits for the network of a note: the process that serves it may stand still."""


class Group(ABC):
    """The ranks of a job, as one of them sees it."""

    name: str
    """For messages: "torch.distributed", "MPI" …"""
    rank: int
    """Of this process (or thread), 0 … size - 1."""
    size: int
    can_exchange: bool = False
    """Whether `exchange` is there."""
    can_gather: bool = True
    """Whether `all_gather` is there, and not only `broadcast`."""

    has_network_notes: bool = False
    """Whether notes go through a network, too."""

    _is_one_host: bool | None = None
    _note_thread: threading.Thread | None = None

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Collective; when a repository is opened, and by loads."""

    def broadcast(self, data: bytes | None) -> bytes:
        """The bytes of rank 0; the others' are not looked at. Collective."""
        return self.all_gather(self._broadcast_input(data))[0]

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Send and receive, all at once. Collective, for a rank with nothing to hand over too.

        Between two ranks messages keep their order, and what is received is as long as what was sent. A rank may send
        to itself. The memory is free for reuse when this returns.
        """
        if not self.can_exchange:
            raise InvalidArgument(f"{self.name} has no messages from rank to rank; gather, or let each rank read")
        send, receive = self._flat_messages(send), self._flat_messages(receive)
        mine = [data for peer, data in send if peer == self.rank]
        for source, target in zip(mine, (data for peer, data in receive if peer == self.rank), strict=True):
            target[:] = source
        self._exchange([m for m in send if m[0] != self.rank], [m for m in receive if m[0] != self.rank])

    def _flat_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as flat bytes. One of no bytes is left out on both sides: not every library takes such."""
        for peer, _ in messages:
            if not 0 <= peer < self.size:
                raise InvalidArgument(f"there is no rank {peer} in {self!r}")
        return [(peer, data.cast("B")) for peer, data in messages if data.nbytes]

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """`exchange` with other ranks, of flat messages that hold something."""
        raise NotImplementedError

    def meet_at(self, store: Store) -> None:  # noqa: B027  most groups have a network
        """Name the place where a group without a network meets from now on. Collective."""

    def one_host(self) -> bool:
        """Whether all ranks run on one host, so that they share its memory. Collective when first asked."""
        if self._is_one_host is None:
            self._is_one_host = len(set(self.all_gather(_host_identity()))) == 1
        return self._is_one_host

    # --- notes -------------------------------------------------------------------------------------------------

    def leave_note(self, key: str, note: bytes) -> None:
        """Let the other ranks read a few bytes under a key: through the group's network, where it has one, and the memory of
        this host. Not collective. It needs no store, waits for no rank and raises nothing; it may not arrive.

        One key has one note: a later one may replace it.
        """
        self._call_or_none(lambda: host_notes.write(key, note))
        if self.has_network_notes:
            self._call_or_none(lambda: self._call_with_timeout(lambda: self._leave_network_note(key, note)))

    def note(self, key: str) -> bytes | None:
        """The note that a rank left under a key, None where none has arrived. Not collective; raises nothing."""
        found = host_notes.read(key)
        if found is None and self.has_network_notes:
            found = self._call_or_none(lambda: self._call_with_timeout(lambda: self._network_note(key)))
        return found

    def _leave_network_note(self, key: str, note: bytes) -> None:
        """`leave_note` through the network of the group."""
        raise NotImplementedError

    def _network_note(self, key: str) -> bytes | None:
        """`note` from the network of the group."""
        raise NotImplementedError

    def _call_with_timeout(self, call: Callable[[], bytes | None]) -> bytes | None:
        """What a call returns, None where it takes too long. While a call hangs, no other one is made."""
        if self._note_thread is not None and self._note_thread.is_alive():
            return None
        found: list[bytes | None] = []
        self._note_thread = threading.Thread(
            target=lambda: found.append(self._call_or_none(call)), name="ckpt-notes", daemon=True
        )
        self._note_thread.start()
        self._note_thread.join(_NOTE_SECONDS)
        return found[0] if found else None

    def _call_or_none(self, call: Callable[[], bytes | None]) -> bytes | None:
        try:
            return call()
        except Exception as error:  # of whatever library the group uses: who waits goes on waiting, as without notes
            log.debug("%r: a note could not be passed on: %s", self, error)
            return None

    def close(self) -> None:  # noqa: B027  most groups hold nothing
        """Give back what the group holds. Waits for nobody for long."""

    def __repr__(self) -> str:
        return f"{self.name}, rank {self.rank} of {self.size}"

    def _broadcast_input(self, data: bytes | None) -> bytes:
        """What this rank brings to a broadcast."""
        if self.rank:
            return b""
        if data is None:
            raise InvalidArgument("rank 0 broadcasts, and was given nothing")
        return data

    @contextmanager
    def _as_group_error(self, doing: str) -> Iterator[None]:
        """Turn an error of the group's library, or of its meeting place, into a GroupError that says where.

        MPI, torch and jax all raise kinds of RuntimeError; torch a ValueError once the process group is destroyed.
        """
        try:
            yield
        except StoreError as error:  # it says itself what to do
            raise GroupError(f"{self!r}: {doing} failed: {first_line(error)}") from error
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"{self!r}: {doing} failed: {first_line(error)}; see whether a rank has died, and restart the job"
            ) from error


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a message, not all of a thousand."""
    listed = ", ".join(map(str, ranks[:16])) + (f" … ({len(ranks)} in all)" if len(ranks) > 16 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def timeout_error(group: Group, missing: Sequence[int], doing: str, seconds: float) -> GroupError:
    """The error of a rank that has waited long enough."""
    return GroupError(
        f"{group!r}: {ranks_text(missing)} did not come within {seconds:g} s to {doing}; every rank must make the same "
        "call: see whether one has died, or give group=None where a process works alone"
    )


def step_mismatch_error(doing: str, rank: int, size: int, step: int | None, step_of_rank_0: int | None) -> InvalidArgument:
    """The error of a rank that was given another step than rank 0."""

    def named(number: int | None) -> str:
        return f"the {'newest' if doing == 'load' else 'next'} one (step=None)" if number is None else f"step {number}"

    return InvalidArgument(
        f"rank {rank} of {size} was to {doing} {named(step)}, rank 0 {named(step_of_rank_0)}; every rank must name the same "
        "step"
    )


def _host_identity() -> bytes:
    from ckpt.groups.process_identity import this_process

    me = this_process()
    # Containers of one host share the boot, not the name, and most often not the memory either.
    return f"{me.host} {me.boot}".encode()


class SingleProcessGroup(Group):
    """One process that works for itself."""

    name = "one process"
    rank = 0
    size = 1
    can_exchange = True

    def all_gather(self, data: bytes) -> list[bytes]:
        return [bytes(data)]

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """There are no others."""
