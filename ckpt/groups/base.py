"""`Group`, the interface to the ranks of a job: rank and size, gather, broadcast, exchange and notes.

A call marked "collective" must be made by every rank, in the same order, or it does not return. A save makes no collective call
after the ranks have met, so that a dead or slow rank cannot block the others.
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
from ckpt.storage.base.forks import fork_safe_lock
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

Message = tuple[int, memoryview]
"""The other rank, and the bytes to send or the memory to fill."""

GROUP_TIMEOUT_SECONDS = 600.0
"""Seconds that a rank waits for the others if the library of the group has no timeout. Before the first save of a large job,
each rank compiles and loads its model, which takes minutes and differs between ranks."""

MESSAGE_PIECE_BYTES = 1 << 30
"""Longer messages are split: counts of MPI had 32 bits until MPI 4, and not every backend of torch accepts 2 GiB at once."""

_NOTE_SECONDS = 2.0
"""Seconds that a call waits for a note from the network, since the process that serves notes may be stopped."""

_note_lock = fork_safe_lock()
"""Guards `_note_thread` of all groups."""


class Group(ABC):
    """The ranks of a job that save and load together, as one of them sees it.

    A class for another network sets `name`, `rank` and `size` and implements `all_gather`:

        class MyGroup(ckpt.groups.Group):
            name = "my network"

            def __init__(self, network):
                self.rank, self.size, self._network = network.rank, network.size, network

            def all_gather(self, data):
                return self._network.gather_bytes(data)
    """

    name: str
    """The name in messages: "torch.distributed", "MPI" …"""
    rank: int
    """The rank of this process or thread, 0 … size - 1."""
    size: int
    """The number of ranks."""
    can_exchange: bool = False
    """Whether the group implements `exchange`."""
    can_gather: bool = True
    """Whether the group implements `all_gather`; if not, only `broadcast`."""

    has_network_notes: bool = False
    """Whether notes also go through a network."""

    _is_one_host: bool | None = None
    _note_thread: threading.Thread | None = None
    """The thread of the last call for a note through the network. Guarded by `_note_lock`."""

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of ranks. Collective; used to open a repository and to load.

        Raises:
            GroupError: A rank is missing, or the network fails.
        """

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the bytes of rank 0; the data of the other ranks are ignored. Collective.

        Raises:
            GroupError: A rank is missing, or the network fails.
            InvalidArgument: Rank 0 gives None.
        """
        return self.all_gather(self._broadcast_input(data))[0]

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Send and receive messages between ranks at the same time. Collective, also for a rank without messages.

        Messages between two ranks keep their order, and each received message has the length of the sent one. A rank may send
        to itself. The memory may be reused when this returns.

        send: (receiver, bytes). receive: (sender, memory to fill).

        Raises:
            GroupError: A rank is missing, or the network fails.
            InvalidArgument: The group has no exchange, or no rank of this number.
        """
        if not self.can_exchange:
            raise InvalidArgument(f"{self.name} cannot send messages between ranks; use all_gather, or let each rank read")
        send, receive = self._flat_messages(send), self._flat_messages(receive)
        mine = [data for peer, data in send if peer == self.rank]
        for source, target in zip(mine, (data for peer, data in receive if peer == self.rank), strict=True):
            target[:] = source
        self._exchange([m for m in send if m[0] != self.rank], [m for m in receive if m[0] != self.rank])

    def _flat_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as flat bytes, without empty ones on either side, which some libraries do not accept."""
        for peer, _ in messages:
            if not 0 <= peer < self.size:
                raise InvalidArgument(f"there is no rank {peer} in {self!r}; give one from 0 to {self.size - 1}")
        return [(peer, data.cast("B")) for peer, data in messages if data.nbytes]

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """`exchange` for non-empty flat messages to and from other ranks."""
        raise NotImplementedError

    def meet_at(self, store: Store) -> None:  # noqa: B027  most groups have a network
        """Set the store through which a group without a network exchanges bytes from now on. Collective."""

    def one_host(self) -> bool:
        """Return whether all ranks run on one host, so that they share its memory. The first call is collective."""
        if self._is_one_host is None:
            self._is_one_host = len(set(self.all_gather(_host_identity()))) == 1
        return self._is_one_host

    # --- notes -------------------------------------------------------------------------------------------------

    def leave_note(self, key: str, note: bytes) -> None:
        """Publish a few bytes under a key, through the memory of this host and the network of the group if it has one.

        Not collective: it needs no store, waits for no rank and raises no error. The note may not arrive. A key has one note: a
        later one may replace it.
        """
        self._call_or_none(lambda: host_notes.write(key, note))
        if self.has_network_notes:
            self._call_or_none(lambda: self._call_with_timeout(lambda: self._leave_network_note(key, note)))

    def note(self, key: str) -> bytes | None:
        """Return the note that a rank left under a key, None if none has arrived. Not collective; raises no error."""
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
        """Return the result of a call, None if it takes too long. While one call runs, no other call is made."""
        found: list[bytes | None] = []
        thread = threading.Thread(target=lambda: found.append(self._call_or_none(call)), name="ckpt-notes", daemon=True)
        with _note_lock:
            if self._note_thread is not None and self._note_thread.is_alive():
                return None
            thread.start()
            self._note_thread = thread
        thread.join(_NOTE_SECONDS)
        return found[0] if found else None

    def _call_or_none(self, call: Callable[[], bytes | None]) -> bytes | None:
        try:
            return call()
        except Exception as error:  # of any library: without the note, a waiting rank waits until its timeout
            log.debug("%r: a note could not be published or read: %s", self, error)
            return None

    def close(self) -> None:  # noqa: B027  most groups have no resources
        """Release the resources of the group, after waiting a few seconds for other ranks at most."""

    def __repr__(self) -> str:
        return f"{self.name}, rank {self.rank} of {self.size}"

    def _broadcast_input(self, data: bytes | None) -> bytes:
        """Return the bytes that this rank contributes to a broadcast: none unless it is rank 0."""
        if self.rank:
            return b""
        if data is None:
            raise InvalidArgument("broadcast: rank 0 must give the data, and it gave None")
        return data

    @contextmanager
    def _as_group_error(self, doing: str) -> Iterator[None]:
        """Turn an error of the group's library, or of its rendezvous store, into a GroupError that names group and rank.

        MPI, torch and jax raise subclasses of RuntimeError; torch raises ValueError after the process group was destroyed.
        """
        try:
            yield
        except StoreError as error:  # its message has the advice
            raise GroupError(f"{self!r}: {doing} failed: {first_line(error)}") from error
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"{self!r}: {doing} failed: {first_line(error)}; check whether a rank has died, and restart the job"
            ) from error


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks for a message: the first 16, and how many there are."""
    listed = ", ".join(map(str, ranks[:16])) + (f" … ({len(ranks)} in all)" if len(ranks) > 16 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def timeout_error(group: Group, missing: Sequence[int], doing: str, seconds: float) -> GroupError:
    """Return the error of a rank that has waited `seconds` for the missing ranks. doing: such as "a gather"."""
    return GroupError(
        f"{group!r}: {ranks_text(missing)} did not join {doing} within {seconds:g} s; every rank must make the same "
        "call: check whether one has died, or give group=None if a process works alone"
    )


def step_mismatch_error(doing: str, rank: int, size: int, step: int | None, step_of_rank_0: int | None) -> InvalidArgument:
    """Return the error of a rank whose step differs from that of rank 0. doing: "save" or "load"; step: None for none."""

    def named(number: int | None) -> str:
        return f"the {'newest' if doing == 'load' else 'next'} one (step=None)" if number is None else f"step {number}"

    return InvalidArgument(
        f"rank {rank} of {size} was to {doing} {named(step)}, rank 0 {named(step_of_rank_0)}; every rank must give the same "
        "step"
    )


def _host_identity() -> bytes:
    from ckpt.groups.process_identity import this_process

    me = this_process()
    # Containers of one host have the same boot id but different names, and mostly do not share memory.
    return f"{me.host} {me.boot}".encode()


class SingleProcessGroup(Group):
    """A group of one process."""

    name = "one process"
    rank = 0
    size = 1
    can_exchange = True

    def all_gather(self, data: bytes) -> list[bytes]:
        return [bytes(data)]

    def _exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Do nothing: there are no other ranks."""
