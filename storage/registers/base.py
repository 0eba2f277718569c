"""Registers: the small records of a member, each one an acceptor for a consensus among members.

A register keeps one value under a name, and two ballots: the highest it has promised and that of the value. The rules
are those of Paxos (Lamport 2001) for one rewritable value (CASPaxos, Rystsov 2018), plus a direct change for the common case
in which nobody competes; `aggregator/records/paxos.py` is the proposer and says why the two fit together.

Everything goes in batches: a call on a thousand names is one trip and one fsync.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ckpt.storage.base.errors import Changed
from ckpt.storage.registers.fence_numbers import has_era

ABSENT_NAME = "/ "
"""A name that no file has: asked for it, a member says whether it votes on what it does not have."""

BODY_BYTES = 32 << 20
"""The longest value that a register takes."""


class Ballot(NamedTuple):
    """A number that no two proposals share. They are ordered field by field.

    A proposal through both phases has `step` 0. A direct change of a value with ballot b has b's round and owner and the
    step after b's: higher than b, lower than any other ballot that is higher than b.
    """

    round: int
    owner: str
    step: int = 0
    writer: str = ""

    def next_step(self, writer: str) -> Ballot:
        """The ballot of a direct change of a value that has this one."""
        return Ballot(self.round, self.owner, self.step + 1, writer)


NO_BALLOT = Ballot(0, "")
"""Lower than all others: nothing promised, nothing accepted."""


def floor_ballot(fence_number: int) -> Ballot:
    """The ballot above which a member with this fence number takes values for a register that it does not have."""
    return Ballot(fence_number, "") if has_era(fence_number) else NO_BALLOT


_FINAL_BALLOT = Ballot(1 << 60, "final")


@dataclass(frozen=True, slots=True)
class RegisterValue:
    """What a register keeps. Its meaning is the namespace's; listings bring the head alone."""

    head: bytes
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Record:
    """One member's register: what it promised, and the value that it accepted last."""

    promised: Ballot = NO_BALLOT
    accepted: Ballot = NO_BALLOT
    value: RegisterValue | None = None


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """In place of a record whose bytes are not those that were stored. It votes for nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class DirectChange:
    """A direct change: this value, where the register's ballot is still `expected`."""

    name: str
    expected: Ballot
    value: RegisterValue


RegisterAnswer = Record | DamagedRecord

REGISTERS_INCOMPLETE = DamagedRecord("the registers of this member are new, or were lost and are not all back")
"""What a member says of a name that it does not have, until it was told that it has all."""


class Registers(ABC):
    """The registers of one member. Safe to use from many threads and, on one host, processes.

    Every call is durable when it returns, and answers for each name in the order asked. Raises StoreError.

    epoch: the fence number that the caller goes by (`storage/registers/fence_numbers.py`). A member that was fenced by a
    later one, or has changed anything by a later one, raises Outdated, and does nothing. 0 is for what no ring decides.

    A register without a value has promised the floor of the member's fence number, at least.
    """

    @abstractmethod
    def read(self, names: Sequence[str], fence_number: int = 0) -> list[RegisterAnswer]:
        """The records; an empty one where there is none, damaged before `complete`."""

    @abstractmethod
    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        """Promise to accept nothing below `ballot`, unless a higher one is promised. The records after that: where
        `promised` equals `ballot` the promise was given."""

    @abstractmethod
    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        """Take the values unless a higher ballot is promised; whether each was taken.

        heal: also in place of a damaged record, whose promises nobody knows. Only for values that a quorum of the other
        members has taken, after it promised this ballot: whoever counts on a lost promise finds one of those.
        """

    @abstractmethod
    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        """Take each value whose register has the expected ballot and has promised nothing higher; whether it was taken.

        The new ballot is `expected.next_step(writer)`. A damaged register takes nothing.
        """

    @abstractmethod
    def reset(self) -> None:
        """Put what there is aside and begin with nothing."""

    @abstractmethod
    def mark_complete(self) -> None:
        """From now on a register that is not here is an empty one.

        Before that it counts as damaged: an empty disk in the place of a lost one must not vote that there is nothing. Said
        when a namespace is made, and when the others' records have been brought back.
        """

    @abstractmethod
    def fence(self, fence_number: int) -> bool:
        """Refuse calls of an earlier ring or era from now on; whether such calls were taken until now."""

    @abstractmethod
    def collect(self, expected_ballots: Sequence[tuple[str, Ballot]], fence_number: int) -> int:
        """Forget registers of deleted files that still have these ballots, and have promised nothing that reaches the floor.

        A ballot of NONE is for registers without a value. How many were forgotten. Only
        `aggregator/maintenance/record_collection.py` knows when this may be done.
        """

    @abstractmethod
    def learn(self, name: str, value: RegisterValue) -> None:
        """Note what a register is for ever, for it was agreed and may not be changed. Those who ask see it `is_final`.

        Raises Changed where it is something else for ever.
        """

    @abstractmethod
    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        """Become a member of the ring of this number: forget registers from an earlier time here, fence and complete.

        Nothing happens where a ring of this number, or a later one, was joined or has fenced already. keep: what begins so
        is not forgotten. Votes on rings must not be: who gave one could give another.
        """

    @abstractmethod
    def drop(self, names: Sequence[str], fence_number: int) -> None:
        """Forget registers that members of this ring keep elsewhere."""

    @abstractmethod
    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        """Records, in order of name, of the names that begin with `prefix` and come after `after`; bodies are left out."""

    def close(self) -> None:  # noqa: B027
        """Give back what is held."""

    def scan_all(self, prefix: str, fence_number: int = 0) -> Iterator[tuple[str, RegisterAnswer]]:
        """All records of the names that begin with `prefix`, without bodies."""
        after, limit = "", 10_000
        while True:
            found = self.scan(prefix, after, limit, fence_number)
            yield from found
            if len(found) < limit:
                return
            after = found[-1][0]


def with_floor_promise(record: Record, fence_number: int) -> Record:
    """A record as its member shows it, which has this fence number: without a value it has promised the floor."""
    if record.value is not None or record.promised >= floor_ballot(fence_number):
        return record
    return Record(floor_ballot(fence_number), record.accepted, None)


def can_collect(record: RegisterAnswer, ballot: Ballot, fence_number: int) -> bool:
    """Whether a register may be forgotten by a member with this fence number, if it was found with this ballot."""
    if not isinstance(record, Record) or is_final(record):
        return False
    return record.accepted == ballot and record.promised <= floor_ballot(fence_number)


def final_record(value: RegisterValue) -> Record:
    """A record that can't be changed any more."""
    return Record(_FINAL_BALLOT, _FINAL_BALLOT, value)


def is_final(answer: RegisterAnswer) -> bool:
    """Whether a record says that it can't be changed any more. Its promise does not tell: another may have been asked for one
    as high."""
    return isinstance(answer, Record) and answer.accepted == _FINAL_BALLOT


def require_same_value(record: RegisterAnswer, name: str, value: RegisterValue) -> None:
    """Raise Changed where a final record says something else than this value."""
    if not isinstance(record, Record) or record.value != value:
        raise Changed(f"{name} was agreed upon before, and is something else; this member belongs to another namespace")


def with_promise(record: RegisterAnswer, ballot: Ballot) -> Record | None:
    """The register after it has promised this ballot; None where it does not."""
    if isinstance(record, DamagedRecord) or is_final(record) or record.promised >= ballot:
        return None
    return Record(ballot, record.accepted, record.value)


def can_accept(record: RegisterAnswer, ballot: Ballot, repair_damaged: bool) -> bool:
    """Whether a register takes a value that is proposed by this ballot."""
    return repair_damaged if isinstance(record, DamagedRecord) else record.promised <= ballot and not is_final(record)


def can_change_directly(record: RegisterAnswer, change: DirectChange) -> bool:
    """Whether a register accepts a direct change. Nothing higher may be promised: a promise was given to a proposer that
    has read the register and counts on finding it so."""
    if isinstance(record, DamagedRecord) or is_final(record):
        return False
    return record.accepted == change.expected and record.promised <= change.expected


def record_checksum(name: str, promised: bytes, accepted: bytes, value: RegisterValue | None) -> int:
    """Over all of a record; kept beside it, so that rot is found before it votes."""
    sums = xxhash.xxh3_64()
    for part in (name.encode(), promised, accepted, *((value.head, value.body) if value else (b"", b"\0"))):
        sums.update(len(part).to_bytes(8, "little"))
        sums.update(part)
    return sums.intdigest() - (1 << 63)  # SQLite's integers are signed


def encode_ballot(ballot: Ballot) -> bytes:
    """As bytes, in the same order."""
    return b"%020d/%s/%010d/%s" % (ballot.round, ballot.owner.encode(), ballot.step, ballot.writer.encode())


def decode_ballot(data: bytes) -> Ballot:
    """The counterpart of `encode_ballot`; ValueError where it is none."""
    round_, owner, step, writer = data.decode().split("/")
    return Ballot(int(round_), owner, int(step), writer)
