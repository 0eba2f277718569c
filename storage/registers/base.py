"""`Registers`, the interface to the small records of a member, each an acceptor of a consensus among members.

A register has one value under a name, and two ballots: the highest that it has promised, and that of the value. The rules are
those of Paxos (Lamport 2001) for one rewritable value (CASPaxos, Rystsov 2018), plus a direct change for the common case
without competing proposers. `aggregator/records/paxos.py` is the proposer, and explains why the two are compatible.

All calls take batches: a call for a thousand names costs one round trip and one fsync.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ckpt.storage.base.errors import Changed, StoreError
from ckpt.storage.registers.fence_numbers import has_era

ABSENT_NAME = "/ "
"""A name that no file has. The answer for it shows whether the member votes on registers that it does not have."""

BODY_BYTES = 32 << 20
"""The most bytes of a value, head and body, that a register accepts."""


class Ballot(NamedTuple):
    """A proposal number that no two proposals share. Ballots are ordered field by field.

    A proposal through both phases has `step` 0. A direct change of a value with ballot b has the round and owner of b and the
    next step: it is higher than b, and lower than every other ballot that is higher than b.
    """

    round: int
    owner: str
    step: int = 0
    writer: str = ""

    def next_step(self, writer: str) -> Ballot:
        """Return the ballot of a direct change of a value that has this ballot."""
        return Ballot(self.round, self.owner, self.step + 1, writer)


NO_BALLOT = Ballot(0, "")
"""The lowest ballot: nothing is promised, nothing is accepted."""


def floor_ballot(fence_number: int) -> Ballot:
    """Return the ballot above which a member with this fence number accepts values for a register that it does not have."""
    return Ballot(fence_number, "") if has_era(fence_number) else NO_BALLOT


_FINAL_BALLOT = Ballot(1 << 60, "final")


@dataclass(frozen=True, slots=True)
class RegisterValue:
    """The value of a register, whose meaning the namespace defines. Listings return only the head."""

    head: bytes
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Register:
    """A register of one member: the ballot that it promised, and the value that it accepted last, with its ballot."""

    promised_ballot: Ballot = NO_BALLOT
    accepted_ballot: Ballot = NO_BALLOT
    value: RegisterValue | None = None


@dataclass(frozen=True, slots=True)
class DamagedRegister:
    """The answer for a record that is damaged, or may have been lost. It does not count as a vote."""

    reason: str


@dataclass(frozen=True, slots=True)
class DirectChange:
    """A direct change: set this value if the ballot of the register's value is still `expected`."""

    name: str
    expected: Ballot
    value: RegisterValue


RegisterAnswer = Register | DamagedRegister

REGISTERS_INCOMPLETE = DamagedRegister("the registers of this member are new, or were lost and are not all restored")
"""The answer of a member for a name that it does not have, until `mark_complete` was called."""


class Registers(ABC):
    """The registers of one member. Many threads may use them, and many processes of one host.

    Every change is durable when the call returns. Calls that take names answer for each name, in the same order. All calls
    raise StoreError if they fail.

    fence_number: that of the caller (`storage/registers/fence_numbers.py`). A member that was fenced by a later number, or has
        made a change by a later one, raises Outdated and changes nothing. A call that may have changed something before the
        member was fenced raises another StoreError. 0 is for calls that do not depend on a record ring.

    A register without a value has promised at least the floor of the member's fence number.
    """

    @abstractmethod
    def read(self, names: Sequence[str], fence_number: int = 0) -> list[RegisterAnswer]:
        """Return the records; for a missing one an empty record, or a damaged one before `mark_complete`."""

    @abstractmethod
    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        """Promise to accept nothing below `ballot`, unless a higher ballot is promised; return the records after that.

        The promise was given where `promised_ballot` equals `ballot`.
        """

    @abstractmethod
    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        """Accept each value unless a higher ballot is promised; return for each whether it was accepted.

        repair_damaged: also replace a damaged record, whose promises are unknown. Only for values that a read quorum of the
            other members has accepted, after it promised this ballot. Each quorum has one of those members, which refuses a
            proposer that relies on a lost promise.
        """

    @abstractmethod
    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        """Make each change if its register has the expected ballot and has promised none above; return which were made.

        The new ballot is `expected.next_step(writer)`. A damaged register accepts nothing.
        """

    @abstractmethod
    def reset(self) -> None:
        """Rename the existing registers as damaged, and start without any."""

    @abstractmethod
    def mark_complete(self) -> None:
        """Treat a register that does not exist as an empty one from now on.

        Before this call it counts as damaged: an empty disk that replaced a lost one must not vote that a file does not exist.
        Called when a namespace is created, and when the records of the other members have been restored here.
        """

    @abstractmethod
    def fence(self, fence_number: int) -> bool:
        """Refuse calls of an earlier ring or era from now on; return whether such calls were accepted before."""

    @abstractmethod
    def collect(self, expected_ballots: Sequence[tuple[str, Ballot]], fence_number: int) -> int:
        """Delete registers of deleted files; return how many.

        Only `aggregator/records/tombstone_collection.py` knows when this is allowed.

        expected_ballots: a register is deleted only if its value has this ballot (NO_BALLOT: no value) and it has promised
            nothing above the floor of the member's fence number.
        """

    @abstractmethod
    def learn(self, name: str, value: RegisterValue) -> None:
        """Store a value that was agreed on and will never change; `is_final` is true for its record.

        Raises Changed if the register has another final value.
        """

    @abstractmethod
    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        """Become a member of the record ring of this number: delete older registers, `fence` and `mark_complete`.

        Nothing happens if a ring of this number or a later one was joined or has fenced this member already.

        kept_prefix: registers whose names begin with it are kept. Votes on rings must be kept, because a member that forgets a
            vote could vote twice.
        """

    @abstractmethod
    def drop(self, names: Sequence[str], fence_number: int) -> None:
        """Delete registers that other members of this ring keep."""

    @abstractmethod
    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        """Return up to `limit` records without bodies, by name, for names that begin with `prefix` and are above `after`."""

    def close(self) -> None:  # noqa: B027
        """Release the resources of the registers."""

    def scan_all(self, prefix: str, fence_number: int = 0) -> Iterator[tuple[str, RegisterAnswer]]:
        """Yield all records whose names begin with `prefix`, without bodies."""
        after, limit = "", 10_000
        while True:
            found = self.scan(prefix, after, limit, fence_number)
            yield from found
            if len(found) < limit:
                return
            after = found[-1][0]


def with_floor_promise(record: Register, fence_number: int) -> Register:
    """Return a record as a member with this fence number reports it: without a value, it has promised at least the floor."""
    if record.value is not None or record.promised_ballot >= floor_ballot(fence_number):
        return record
    return Register(floor_ballot(fence_number), record.accepted_ballot, None)


def can_collect(record: RegisterAnswer, ballot: Ballot, fence_number: int) -> bool:
    """Return whether a member with this fence number may delete a register whose value was found with this ballot."""
    if not isinstance(record, Register) or is_final(record):
        return False
    return record.accepted_ballot == ballot and record.promised_ballot <= floor_ballot(fence_number)


def final_record(value: RegisterValue) -> Register:
    """Return a record that can never change."""
    return Register(_FINAL_BALLOT, _FINAL_BALLOT, value)


def is_final(answer: RegisterAnswer) -> bool:
    """Return whether a record can never change. Its promise does not show that: it may have promised a ballot that high."""
    return isinstance(answer, Register) and answer.accepted_ballot == _FINAL_BALLOT


def require_same_value(record: RegisterAnswer, name: str, value: RegisterValue) -> None:
    """Raise Changed unless a final record has this value."""
    if not isinstance(record, Register) or record.value != value:
        raise Changed(
            f"{name} was agreed on before with another value; this member belongs to another namespace: name it there only"
        )


def with_promise(record: RegisterAnswer, ballot: Ballot) -> Register | None:
    """Return the record after it has promised this ballot; None if it does not promise it."""
    if isinstance(record, DamagedRegister) or is_final(record) or record.promised_ballot >= ballot:
        return None
    return Register(ballot, record.accepted_ballot, record.value)


def can_accept(record: RegisterAnswer, ballot: Ballot, repair_damaged: bool) -> bool:
    """Return whether a register accepts a value that is proposed with this ballot."""
    return repair_damaged if isinstance(record, DamagedRegister) else record.promised_ballot <= ballot and not is_final(record)


def can_propose_directly(record: Register, fence_number: int) -> bool:
    """Return whether a client with this fence number may try a direct change of what it has read from the first member.

    A register without a value needs two phases in a later ring: a member may have a first value from an earlier ring, in which
    another member was the first.
    """
    return record.accepted_ballot != NO_BALLOT or fence_number <= 1


def can_change_directly(record: RegisterAnswer, change: DirectChange) -> bool:
    """Return whether a register accepts a direct change.

    It must not have promised a higher ballot: the proposer of that ballot has read the register and relies on its value.
    """
    if isinstance(record, DamagedRegister) or is_final(record):
        return False
    return record.accepted_ballot == change.expected and record.promised_ballot <= change.expected


def require_record_fits(name: str, value: RegisterValue | None) -> None:
    """Raise StoreError if a value is longer than a register takes."""
    if value is not None and (nbytes := len(value.head) + len(value.body)) > BODY_BYTES:
        raise StoreError(f"the record of {name} has {nbytes} bytes; a register takes at most {BODY_BYTES}; write smaller files")


def record_checksum(name: str, promised: bytes, accepted: bytes, value: RegisterValue | None) -> int:
    """Return the checksum of a whole record. It is stored with the record, so that a damaged record never votes."""
    sums = xxhash.xxh3_64()
    for part in (name.encode(), promised, accepted, *((value.head, value.body) if value else (b"", b"\0"))):
        sums.update(len(part).to_bytes(8, "little"))
        sums.update(part)
    return sums.intdigest() - (1 << 63)  # SQLite's integers are signed


def encode_ballot(ballot: Ballot) -> bytes:
    """Return a ballot as bytes whose order is that of the ballots."""
    return b"%020d/%s/%010d/%s" % (ballot.round, ballot.owner.encode(), ballot.step, ballot.writer.encode())


def decode_ballot(data: bytes) -> Ballot:
    """Return the ballot that `encode_ballot` encoded; raise ValueError for other bytes."""
    round_, owner, step, writer = data.decode().split("/")
    return Ballot(int(round_), owner, int(step), writer)
