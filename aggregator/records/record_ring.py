"""The record ring: the agreed list of the members that keep records, from which each path's replica set follows.

Fragments may be on any members, because a record names them. Nothing names the members of a record, so all clients must compute
its replica set from the same list. Each ring has a register of its own, `ring/<number>`, under a name that no path has. The
members of the previous ring agree on its value, which is final. So the rings are a chain: the newest ring is its end, and a
client with an old ring follows the chain to it. `aggregator/records/ring_change.py` makes the next ring.
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
from ckpt.storage.registers.base import ABSENT_NAME, Ballot, Register, RegisterAnswer, Registers, RegisterValue, is_final

RING_PREFIX = "ring/"


@dataclass(frozen=True, slots=True)
class RecordRing:
    """The members that keep records, and how many of them may be lost."""

    epoch: int
    """The number of the ring; each ring has the number after that of the ring whose members agreed on it."""
    members: tuple[MemberLocation, ...]
    tolerated_losses: int
    """How many members may be lost at once, without the loss of a record."""
    namespace: str
    """The random id of the namespace, which shows members of different namespaces."""
    previous: RecordRing | None = None
    """While records move to the members of this ring: the ring whose members have all records."""
    agreed_by: RecordRing | None = None
    """The ring whose members agreed on this one; None for the first ring, on which all of its own members agreed."""
    removed_members: tuple[str, ...] = ()
    """Members that were removed from the namespace. Nobody writes to them, even if a configuration lists them."""
    member_fence_number: int = 0
    """The fence number that members had when the ring was read from them. It is not a part of the stored ring."""

    @property
    def fence_number(self) -> int:
        """The fence number of calls under this ring (`storage/registers/fence_numbers.py`)."""
        return fence_numbers.number_for_ring(self.epoch, self.member_fence_number)

    @property
    def next_fence_number(self) -> int:
        """The first fence number of the ring after this one."""
        return fence_numbers.advance_fence(self.fence_number, self.epoch + 1)

    @property
    def register_name(self) -> str:
        """The name of the ring's register."""
        return f"{RING_PREFIX}{self.epoch:010d}"

    @property
    def quorum(self) -> Quorum:
        """The quorum of each path's replica set."""
        return quorum(self.tolerated_losses, len(self.members))

    @property
    def all_members(self) -> dict[str, MemberLocation]:
        """All members that keep any record, by name."""
        return {m.name: m for ring in (self.previous, self) if ring for m in ring.members}

    def replica_set(self, path: str) -> ReplicaSet:
        """Return the replica set of a path. Where it has one group, the first member of it orders direct changes."""
        rings = [ring for ring in (self.previous, self) if ring]
        return ReplicaSet(
            tuple(VotingGroup(tuple(choose_members(path, r.members, r.quorum.members)), r.quorum) for r in rings),
            self.fence_number,
        )

    def can_tolerate(self, tolerated: int, available: int) -> bool:
        """Return whether every record can be read after the loss of `tolerated` members, also while records move.

        It asks for no more members than there are: with `2 * tolerated` members, those that are left can read the records.
        """
        needed = min(2 * tolerated, available)
        rings = [ring for ring in (self.previous, self) if ring]
        return all(needed <= len(r.members) and quorum(tolerated, len(r.members)).members <= r.quorum.members for r in rings)

    def can_list(self, answering: Collection[str]) -> bool:
        """Return whether these members together have every record."""
        ring = self.previous or self
        return sum(m.name not in answering for m in ring.members) < ring.quorum.write


def next_ring(
    ring: RecordRing,
    members: tuple[MemberLocation, ...],
    previous: RecordRing | None,
    removed_members: tuple[str, ...],
    tolerated_losses: int,
) -> RecordRing:
    """Return a proposal for the ring after `ring`.

    previous: the ring whose members have all records while they move; None once they have moved.
    """
    agreed_by = replace(ring, agreed_by=None, member_fence_number=0)
    return RecordRing(ring.epoch + 1, members, tolerated_losses, ring.namespace, previous, agreed_by, removed_members)


def ring_electors(ring: RecordRing, destroyed: str = "") -> ReplicaSet:
    """Return the members that agree on the ring after this one, by majority.

    While records move these are the members of the previous ring, which have all records. destroyed: a member whose device
    never comes back, and which does not vote.
    """
    names = sorted(m.name for m in (ring.previous or ring).members)
    voters = tuple(name for name in names if name != destroyed)
    write, read = len(names) // 2 + 1, len(names) - len(names) // 2
    return ReplicaSet((VotingGroup(voters, Quorum(len(voters), min(write, len(voters)), min(read, len(voters)))),))


def ring_registers(
    registers: Mapping[str, Registers], replica_set: ReplicaSet, fan_out: FanOut, seconds: float
) -> ReplicatedRegisters:
    """Return the registers of rings, agreed by this replica set. They are never changed directly."""
    return ReplicatedRegisters(registers, lambda paths: dict.fromkeys(paths, replica_set), fan_out, seconds, is_direct=False)


@dataclass(frozen=True, slots=True)
class _RingAnswer:
    """What one member answers about rings."""

    rings: Sequence[tuple[str, RegisterAnswer]]
    """The rings that it has, each with the name of its register."""
    absent: RegisterAnswer
    """Its answer for a register that does not exist: its fence number, and whether it votes on such registers."""


class _RingUndecided(Unavailable):
    """All members answer, but another client is in the middle of agreeing on a ring."""


def find_ring(
    registers: Mapping[str, Registers], fan_out: FanOut, seconds: float, open_members: Callable[[RecordRing], bool]
) -> RecordRing | None:
    """Return the newest ring as `_find_once` does, and wait for a ring on which another client is just agreeing."""
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
    """Return the newest ring of a namespace; None if all members answer and none has a ring.

    open_members: called with a ring that names members which `registers` lacks; returns whether it added them. Raises
    Unavailable if too few members answer to be sure, and InvalidArgument if they belong to different namespaces.
    """

    def read_rings(member_registers: Registers) -> _RingAnswer:
        (absent,) = member_registers.read([ABSENT_NAME])
        return _RingAnswer(member_registers.scan(RING_PREFIX), absent)

    while True:
        calls: dict[str, Callable[[], _RingAnswer]] = {name: partial(read_rings, each) for name, each in registers.items()}
        answers, errors = fan_out.ask(calls, seconds, lambda got, calls=calls: _newest_agreed_ring(got, calls) is not None)  # type: ignore[misc]
        rings = _list_rings(answers)
        _check_one_namespace(answers)
        if not rings or set(rings[0].all_members) <= set(registers) or not open_members(rings[0]):
            break
    for ring in rings:
        # A member may have a proposed ring that was never agreed.
        agreed = ring if _is_agreed(answers, ring) else _read_agreed_ring(registers, ring, fan_out, seconds)
        if agreed is not None and (_is_newest(answers, agreed) or ring is not rings[0]):
            return replace(agreed, member_fence_number=_max_fence_number(answer.absent for answer in answers.values()))
        if agreed is not None:
            break
    for error in errors.values():
        if isinstance(error, Refused):  # such as a wrong token: waiting does not help
            raise error
    if errors or rings:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        needed = f" of {', '.join(ring_electors(rings[0]).members)}" if rings else ""
        raise (Unavailable if errors else _RingUndecided)(
            f"{len(answers)} of {len(registers)} members answer, which is too few{needed} to find the newest record ring "
            f"({reasons}); start the missing ones (all of them when a namespace is used for the first time)"
        )
    return None


def highest_fence_number(ring: RecordRing, registers: Mapping[str, Registers], fan_out: FanOut, seconds: float) -> int:
    """Return the highest fence number of the members of a ring that answer."""
    calls = {name: partial(registers[name].read, [ABSENT_NAME]) for name in ring.all_members if name in registers}
    answers, _ = fan_out.ask(calls, seconds, is_acceptable=bool, skip_failed=True)
    return _max_fence_number(answer for (answer,) in answers.values())


def _max_fence_number(absent: Iterable[RegisterAnswer]) -> int:
    """Return the highest fence number in members' answers for a register that does not exist; 0 if all are in era 0."""
    return max((answer.promised_ballot.round for answer in absent if isinstance(answer, Register)), default=0)


def _check_one_namespace(answers: Mapping[str, _RingAnswer]) -> None:
    """Raise InvalidArgument if members have agreed rings of different namespaces."""
    members_by_namespace: dict[str, list[str]] = {}
    for member, answer in answers.items():
        for _, record in answer.rings:
            if isinstance(record, Register) and record.value is not None and is_final(record):
                names = members_by_namespace.setdefault(decode_ring(record.value).namespace, [])
                if member not in names:
                    names.append(member)
    if len(members_by_namespace) > 1:
        groups = " and ".join(", ".join(names) for names in members_by_namespace.values())
        raise InvalidArgument(
            f"these members belong to different namespaces: {groups}; list the members of one namespace only, and empty the "
            "folder of a member that is to join another one"
        )


def create_first_ring(
    registers: Mapping[str, Registers],
    locations: tuple[MemberLocation, ...],
    tolerated_losses: int,
    fan_out: FanOut,
    seconds: float,
) -> None:
    """Agree on the first ring, of all members, unless another client was first. Raises Unavailable if a member is missing."""
    ring = RecordRing(1, tuple(MemberLocation(m.name, m.domain) for m in locations), tolerated_losses, secrets.token_hex(8))
    _, errors = fan_out.ask({name: r.mark_complete for name, r in registers.items()}, seconds)
    if errors:
        reasons = "; ".join(map(str, errors.values()))
        raise Unavailable(f"the namespace could not be created, as members do not answer: {reasons}; start all of them")
    agreed = ring_registers(registers, _founding_replica_set(ring), fan_out, seconds).update(
        [ring.register_name], lambda _, value: encode_ring(ring) if value is None else None, expect_absent=True
    )[ring.register_name]
    assert agreed is not None
    publish_ring(registers, decode_ring(agreed), fan_out, seconds)


def _founding_replica_set(ring: RecordRing) -> ReplicaSet:
    """Return the voters on the first ring. All members must accept it, so that a client whose list differs finds it on any."""
    names = tuple(sorted(location.name for location in ring.members))
    return ReplicaSet((VotingGroup(names, Quorum(len(names), len(names), 1)),))


def publish_ring(registers: Mapping[str, Registers], ring: RecordRing, fan_out: FanOut, seconds: float) -> Collection[str]:
    """Write an agreed ring to all of its members, and return the names of those that have it.

    Another client that finds the ring writes it to the others later. Raises Changed if a member has another final ring.
    """
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
    """Return the agreed ring with the number of `ring`, read from the members that vote on it; None if there is none."""
    replica_set = _founding_replica_set(ring) if ring.agreed_by is None else ring_electors(ring.agreed_by)
    if unknown := sorted(set(replica_set.members) - set(registers)):
        raise Unavailable(f"{', '.join(unknown)} keep records too, according to other members; list all of them in the URL")
    value = ring_registers(registers, replica_set, fan_out, seconds).read([ring.register_name])[ring.register_name]
    if value is None:
        return None
    agreed = decode_ring(value)
    publish_ring(registers, agreed, fan_out, seconds)
    return agreed


def _list_rings(answers: Mapping[str, _RingAnswer]) -> list[RecordRing]:
    """Return the rings that any member has, agreed or only proposed, one of each number, the newest first."""
    newest_by_epoch: dict[int, tuple[bool, Ballot, RecordRing]] = {}
    for answer in answers.values():
        for _, record in answer.rings:
            if isinstance(record, Register) and record.value is not None:
                ring = decode_ring(record.value)
                candidate = is_final(record), record.accepted_ballot, ring
                newest = newest_by_epoch.get(ring.epoch, candidate)
                newest_by_epoch[ring.epoch] = max(candidate, newest, key=lambda entry: entry[:2])
    return [newest_by_epoch[epoch][2] for epoch in sorted(newest_by_epoch, reverse=True)]


def _is_agreed(answers: Mapping[str, _RingAnswer], ring: RecordRing) -> bool:
    """Return whether a member has this ring as an agreed one."""
    return any(name == ring.register_name and is_final(record) for answer in answers.values() for name, record in answer.rings)


def _is_newest(answers: Mapping[str, _RingAnswer], ring: RecordRing) -> bool:
    """Return whether enough members that vote on the next ring have answered, so that no next ring can exist."""
    # Members whose registers were lost do not vote.
    voting = {name for name, answer in answers.items() if isinstance(answer.absent, Register)}
    return ring_electors(ring).can_read(voting)


def _newest_agreed_ring(answers: Mapping[str, _RingAnswer], called: Collection[str]) -> RecordRing | None:
    """Return the newest ring if these answers are certain about it, and it names most of the called members; else None."""
    newest = next(iter(_list_rings(answers)), None)
    if newest is None or not _is_agreed(answers, newest) or not _is_newest(answers, newest):
        return None
    return newest if 2 * len(set(called) & set(newest.all_members)) > len(called) else None


def encode_ring(ring: RecordRing) -> RegisterValue:
    """Return a ring as the value of its register."""
    return RegisterValue(msgpack.packb(_pack_ring(ring)))


def decode_ring(value: RegisterValue) -> RecordRing:
    """Return the ring of a register's value. Raises IntegrityError if it can't be read."""
    try:
        return _unpack_ring(*msgpack.unpackb(value.head))
    except (ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(
            f"the record ring can't be read ({error}); install a newer ckpt-store, or if it is damaged replace the member"
        ) from error


def _pack_ring(ring: RecordRing) -> list[object]:
    members = [[m.name, list(m.domain)] for m in ring.members]
    others = [None if each is None else _pack_ring(each) for each in (ring.previous, ring.agreed_by)]
    return [ring.epoch, members, ring.tolerated_losses, ring.namespace, *others, list(ring.removed_members)]


def _unpack_ring(
    epoch: int, members: list[Any], tolerated: int, namespace: str, previous: list[Any] | None, agreed_by: list[Any] | None,
    removed_members: list[str], *_: object,
) -> RecordRing:  # fmt: skip
    locations = tuple(MemberLocation(name, tuple(domain)) for name, domain in members)
    previous_ring, agreeing_ring = (None if each is None else _unpack_ring(*each) for each in (previous, agreed_by))
    return RecordRing(epoch, locations, tolerated, namespace, previous_ring, agreeing_ring, tuple(removed_members))
