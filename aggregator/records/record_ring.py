"""Which members keep the records of which paths. Agreed, kept by every member, and the same for every client.

Fragments may lie anywhere, for a record says where. A record must be found without being told, so that what decides its
place may not differ between clients. Each ring is a register of its own, `ring/<number>`, under a name that no path has: the
members of the ring before agree on it, once and for ever, and all that is agreed by others is agreed in another register. So
the newest ring is the one at the end of the chain, and who knows an old one is led on.
`aggregator/records/ring_change.py` makes the next.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.placement.redundancy import Quorum, quorum
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation, choose_members
from ckpt.aggregator.records.paxos import ReplicatedRegisters
from ckpt.aggregator.records.replica_set import ReplicaSet, VotingGroup
from ckpt.storage.base.errors import Changed, IntegrityError, InvalidArgument, Refused, Unavailable
from ckpt.storage.registers import fence_numbers
from ckpt.storage.registers.base import ABSENT_NAME, Ballot, Record, RegisterAnswer, Registers, RegisterValue, is_final

RING_PREFIX = "ring/"


@dataclass(frozen=True, slots=True)
class RecordRing:
    """The members that keep records, and how many of them may be lost."""

    epoch: int
    members: tuple[MemberLocation, ...]
    tolerated_losses: int
    namespace: str
    """Random, drawn when the namespace was made: rings of different namespaces have nothing to do with each other."""
    previous: RecordRing | None = None
    """While records move to these members: those that keep them all."""
    agreed_by: RecordRing | None = None
    """The ring whose members agreed on this one; None where all of its own did."""
    removed_members: tuple[str, ...] = ()
    """Members that were taken out: nobody writes to them any more, whatever his configuration says."""
    member_fence_number: int = 0
    """The fence number that members had when the ring was read from them. Not a part of the record."""

    @property
    def fence_number(self) -> int:
        """The fence number by which calls under this ring go (`storage/registers/fence_numbers.py`)."""
        return fence_numbers.number_for_ring(self.epoch, self.member_fence_number)

    @property
    def next_fence_number(self) -> int:
        """The first fence number of the ring after this one."""
        return fence_numbers.advance_fence(self.fence_number, self.epoch + 1)

    @property
    def register_name(self) -> str:
        """Of its register."""
        return f"{RING_PREFIX}{self.epoch:010d}"

    @property
    def quorum(self) -> Quorum:
        return quorum(self.tolerated_losses, len(self.members))

    @property
    def all_members(self) -> dict[str, MemberLocation]:
        """All members that keep any record, by name."""
        return {s.name: s for ring in (self.previous, self) if ring for s in ring.members}

    def replica_set(self, path: str) -> ReplicaSet:
        """The members that keep the record of a path; where it is one group, the first of it orders direct changes."""
        rings = [ring for ring in (self.previous, self) if ring]
        return ReplicaSet(
            tuple(VotingGroup(tuple(choose_members(path, r.members, r.quorum.members)), r.quorum) for r in rings),
            self.fence_number,
        )

    def can_tolerate(self, tolerated: int, available: int) -> bool:
        """Whether every record can be read after the loss of so many members, also while records move; as far as that goes with
        the members that are available: of twice as many as are lost, those left know what there is."""
        needed = min(2 * tolerated, available)
        rings = [ring for ring in (self.previous, self) if ring]
        return all(needed <= len(r.members) and quorum(tolerated, len(r.members)).members <= r.quorum.members for r in rings)

    def can_list(self, answering: Collection[str]) -> bool:
        """Whether each record is on one of these members."""
        ring = self.previous or self
        return sum(s.name not in answering for s in ring.members) < ring.quorum.write


def next_ring(
    ring: RecordRing,
    members: tuple[MemberLocation, ...],
    previous: RecordRing | None,
    removed_members: tuple[str, ...],
    tolerated_losses: int,
) -> RecordRing:
    """A ring that may come after this one."""
    agreed_by = replace(ring, agreed_by=None, member_fence_number=0)
    return RecordRing(ring.epoch + 1, members, tolerated_losses, ring.namespace, previous, agreed_by, removed_members)


def ring_electors(ring: RecordRing, destroyed: str = "") -> ReplicaSet:
    """Who agrees on the ring after this one: a majority of its members, or while records move, of those before, which have all.

    without: one that is destroyed, and needs not be asked.
    """
    names = sorted(s.name for s in (ring.previous or ring).members)
    voters = tuple(name for name in names if name != destroyed)
    write, read = len(names) // 2 + 1, len(names) - len(names) // 2
    return ReplicaSet((VotingGroup(voters, Quorum(len(voters), min(write, len(voters)), min(read, len(voters)))),))


def ring_registers(
    registers: Mapping[str, Registers], replica_set: ReplicaSet, fan_out: FanOut, seconds: float
) -> ReplicatedRegisters:
    """For rings."""
    return ReplicatedRegisters(registers, lambda paths: dict.fromkeys(paths, replica_set), fan_out, seconds, is_direct=False)


RingAnswers = Sequence[tuple[str, RegisterAnswer]]
"""What a member knows of rings, and its answer for one that is not there."""


class _RingUndecided(Unavailable):
    """All members answer, and another client is about to agree upon a ring."""


def find_ring(
    registers: Mapping[str, Registers], fan_out: FanOut, seconds: float, open_members: Callable[[RecordRing], bool]
) -> RecordRing | None:
    """As `_find`; what another client is in the middle of is looked at again."""
    until = time.monotonic() + seconds
    while True:
        try:
            return _find_once(registers, fan_out, seconds, open_members)
        except _RingUndecided:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _find_once(
    registers: Mapping[str, Registers], fan_out: FanOut, seconds: float, open_members: Callable[[RecordRing], bool]
) -> RecordRing | None:
    """The newest ring of a namespace; None where all members answer, and none knows of one.

    adopt: called with a ring that names members which `registers` lacks; whether they were added. Raises Unavailable where too
    few members answer to be sure, InvalidArgument where they belong to different namespaces.
    """

    def tell(of: Registers) -> RingAnswers:
        return [*of.scan(RING_PREFIX), *zip([""], of.read([f"{RING_PREFIX}{0:010d}"]), strict=True)]

    while True:
        calls: dict[str, Callable[[], RingAnswers]] = {name: partial(tell, each) for name, each in registers.items()}
        answers, errors = fan_out.ask(calls, seconds, lambda got, calls=calls: _newest_agreed_ring(got, calls) is not None)  # type: ignore[misc]
        rings = _list_rings(answers)
        _check_one_namespace(answers)
        if not rings or set(rings[0].all_members) <= set(registers) or not open_members(rings[0]):
            break
    for ring in rings:
        # A member may know of a try that came to nothing.
        agreed = ring if _is_agreed(answers, ring) else _read_agreed_ring(registers, ring, fan_out, seconds)
        if agreed is not None and (_is_newest(answers, agreed) or ring is not rings[0]):
            return replace(
                agreed, member_fence_number=_max_fence_number(member_answers[-1][1] for member_answers in answers.values())
            )
        if agreed is not None:
            break
    for error in errors.values():
        if isinstance(error, Refused):  # a wrong token and the like, which no waiting mends
            raise error
    if errors or rings:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        asked = f" of {', '.join(ring_electors(rings[0]).members)}" if rings else ""
        raise (Unavailable if errors else _RingUndecided)(
            f"{len(answers)} of {len(registers)} members answer, which is too few{asked} to know what they hold together "
            f"({reasons}); start the missing ones (all of them when a namespace is used for the first time)"
        )
    return None


def highest_fence_number(ring: RecordRing, registers: Mapping[str, Registers], fan_out: FanOut, seconds: float) -> int:
    """The highest fence number of all members of a ring that answer."""
    calls = {name: partial(registers[name].read, [ABSENT_NAME]) for name in ring.all_members if name in registers}
    answers, _ = fan_out.ask(calls, seconds, is_acceptable=bool, skip_failed=True)
    return _max_fence_number(answer for (answer,) in answers.values())


def _max_fence_number(absent: Iterable[RegisterAnswer]) -> int:
    """The highest fence number among members' answers for a register that does not exist; 0 where all are in era 0."""
    return max((answer.promised.round for answer in absent if isinstance(answer, Record)), default=0)


def _check_one_namespace(answers: Mapping[str, RingAnswers]) -> None:
    of: dict[str, list[str]] = {}
    for member, member_answers in answers.items():
        for _, record in member_answers:
            if isinstance(record, Record) and record.value is not None and is_final(record):
                names = of.setdefault(decode_ring(record.value).namespace, [])
                if member not in names:
                    names.append(member)
    if len(of) > 1:
        groups = " and ".join(", ".join(names) for names in of.values())
        raise InvalidArgument(
            f"these members belong to different namespaces: {groups}; name those of one, and empty the folder of a member that "
            "is to join it and was used for something else"
        )


def create_first_ring(
    registers: Mapping[str, Registers],
    locations: tuple[MemberLocation, ...],
    tolerated_losses: int,
    fan_out: FanOut,
    seconds: float,
) -> None:
    """The first ring, of all members, which must all answer; nothing where there is one already."""
    ring = RecordRing(1, tuple(MemberLocation(s.name, s.domain) for s in locations), tolerated_losses, secrets.token_hex(8))
    _, errors = fan_out.ask({name: r.mark_complete for name, r in registers.items()}, seconds)
    if errors:
        raise Unavailable(f"the namespace could not be made: {'; '.join(map(str, errors.values()))}")
    agreed = ring_registers(registers, _founding_replica_set(ring), fan_out, seconds).update(
        [ring.register_name], lambda _, value: encode_ring(ring) if value is None else None, expect_absent=True
    )[ring.register_name]
    assert agreed is not None
    publish_ring(registers, decode_ring(agreed), fan_out, seconds)


def _founding_replica_set(ring: RecordRing) -> ReplicaSet:
    """All must take the first ring: a client that knows of fewer members, or of more, finds it on any of them."""
    names = tuple(sorted(spot.name for spot in ring.members))
    return ReplicaSet((VotingGroup(names, Quorum(len(names), len(names), 1)),))


def publish_ring(registers: Mapping[str, Registers], ring: RecordRing, fan_out: FanOut, seconds: float) -> Collection[str]:
    """Let all members of a ring that was agreed upon know of it; those that know. Who can't be told now is told by others."""
    value = encode_ring(ring)
    calls = {n: partial(registers[n].learn, ring.register_name, value) for n in ring.all_members if n in registers}
    informed, errors = fan_out.ask(calls, seconds, skip_failed=True)
    for error in errors.values():
        if isinstance(error, Changed):
            raise error
    return informed


def _read_agreed_ring(
    registers: Mapping[str, Registers], ring: RecordRing, fan_out: FanOut, seconds: float
) -> RecordRing | None:
    """What those who agree on a ring of this number have agreed upon; None where it is nothing."""
    replica_set = _founding_replica_set(ring) if ring.agreed_by is None else ring_electors(ring.agreed_by)
    if unknown := sorted(set(replica_set.members) - set(registers)):
        raise Unavailable(f"{', '.join(unknown)} keep records too, as the others say; name all of them")
    value = ring_registers(registers, replica_set, fan_out, seconds).read([ring.register_name])[ring.register_name]
    if value is None:
        return None
    agreed = decode_ring(value)
    publish_ring(registers, agreed, fan_out, seconds)
    return agreed


def _list_rings(answers: Mapping[str, RingAnswers]) -> list[RecordRing]:
    """The rings that any member knows of, agreed or not, one of each number, the newest first."""
    newest_by_epoch: dict[int, tuple[bool, Ballot, RecordRing]] = {}
    for member_answers in answers.values():
        for _, record in member_answers:
            if isinstance(record, Record) and record.value is not None:
                ring = decode_ring(record.value)
                each = is_final(record), record.accepted, ring
                newest_by_epoch[ring.epoch] = max(each, newest_by_epoch.get(ring.epoch, each), key=lambda k: k[:2])
    return [newest_by_epoch[epoch][2] for epoch in sorted(newest_by_epoch, reverse=True)]


def _is_agreed(answers: Mapping[str, RingAnswers], ring: RecordRing) -> bool:
    """Whether a member knows that a ring was agreed upon."""
    return any(
        name == ring.register_name and is_final(record)
        for member_answers in answers.values()
        for name, record in member_answers
    )


def _is_newest(answers: Mapping[str, RingAnswers], ring: RecordRing) -> bool:
    """Whether as many of those who agree on the next ring have answered as must, so that there is none."""
    voting = {
        name for name, member_answers in answers.items() if isinstance(member_answers[-1][1], Record)
    }  # the others have forgotten
    return ring_electors(ring).can_read(voting)


def _newest_agreed_ring(answers: Mapping[str, RingAnswers], asked: Collection[str]) -> RecordRing | None:
    """The newest ring, if these answers leave no doubt: also none that it is that of most of those who were asked."""
    newest = next(iter(_list_rings(answers)), None)
    if newest is None or not _is_agreed(answers, newest) or not _is_newest(answers, newest):
        return None
    return newest if 2 * len(set(asked) & set(newest.all_members)) > len(asked) else None


def encode_ring(ring: RecordRing) -> RegisterValue:
    return RegisterValue(msgpack.packb(_pack_ring(ring)))


def decode_ring(value: RegisterValue) -> RecordRing:
    try:
        return _unpack_ring(*msgpack.unpackb(value.head))
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"the record of the members can't be read: {error}") from error


def _pack_ring(ring: RecordRing) -> list[Any]:
    members = [[s.name, list(s.domain)] for s in ring.members]
    others = [None if each is None else _pack_ring(each) for each in (ring.previous, ring.agreed_by)]
    return [ring.epoch, members, ring.tolerated_losses, ring.namespace, *others, list(ring.removed_members)]


def _unpack_ring(
    epoch: int, members: list[Any], tolerated: int, namespace: str, previous: list[Any] | None, agreed_by: list[Any] | None,
    removed_members: list[str], *_: Any,
) -> RecordRing:  # fmt: skip
    spots = tuple(MemberLocation(name, tuple(domain)) for name, domain in members)
    first, second = (None if each is None else _unpack_ring(*each) for each in (previous, agreed_by))
    return RecordRing(epoch, spots, tolerated, namespace, first, second, tuple(removed_members))
