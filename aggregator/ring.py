"""Which members keep the records of which paths. Agreed, kept by every member, and the same for every client.

Fragments may lie anywhere, for a record says where. A record must be found without being told, so that what decides its
place may not differ between clients: the ring is a register of its own, on all members, under a name that no path has.
`aggregator/succession.py` puts another in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.ledger import Group, Keepers, Ledger
from ckpt.aggregator.placement import Spot, choose
from ckpt.aggregator.redundancy import Quorum, quorum
from ckpt.storage.errors import IntegrityError, Unavailable
from ckpt.storage.registers import Record, Registers, Value

NAME = "ring"


@dataclass(frozen=True, slots=True)
class Ring:
    """The members that keep records, and how many of them may be lost."""

    epoch: int
    members: tuple[Spot, ...]
    tolerated: int
    before: Ring | None = None
    """While records move to these members: those that keep them all."""

    @property
    def quorum(self) -> Quorum:
        return quorum(self.tolerated, len(self.members))

    @property
    def everyone(self) -> dict[str, Spot]:
        """All members that keep any record, by name."""
        return {s.name: s for ring in (self.before, self) if ring for s in ring.members}

    def keepers(self, path: str) -> Keepers:
        """The members that keep the record of a path; where it is one group, the first of it orders direct changes."""
        rings = [ring for ring in (self.before, self) if ring]
        return Keepers(tuple(Group(tuple(choose(path, r.members, r.quorum.members)), r.quorum) for r in rings), self.epoch)

    def can_list(self, answering: Collection[str]) -> bool:
        """Whether each record is on one of these members."""
        ring = self.before or self
        return sum(s.name not in answering for s in ring.members) < ring.quorum.write


def own(ring: Ring, without: str = "") -> Keepers:
    """Who keeps the ring itself: all its members. without: one that is destroyed, and needs not be asked."""
    groups = []
    for each in (ring.before, ring):
        if each is not None:
            names = sorted(s.name for s in each.members)
            left = tuple(name for name in names if name != without)
            write, read = len(names) // 2 + 1, len(names) - len(names) // 2
            groups.append(Group(left, Quorum(len(left), min(write, len(left)), min(read, len(left)))))
    return Keepers(tuple(groups))


def ledger(registers: Mapping[str, Registers], keepers: Keepers, fan_out: FanOut, seconds: float) -> Ledger:
    """For the ring itself."""
    return Ledger(registers, lambda paths: dict.fromkeys(paths, keepers), fan_out, seconds)


def find(registers: Mapping[str, Registers], spots: tuple[Spot, ...], tolerated: int, fan_out: FanOut, seconds: float) -> Ring:
    """The ring of a namespace; made of all members where there is none yet, for which all must answer."""

    def enough(answers: Mapping[str, list[object]]) -> bool:
        return _known(answers, registers) is not None

    calls = {name: (lambda r=r: r.read([NAME])) for name, r in registers.items()}
    answers, errors = fan_out.ask(calls, seconds, enough)  # type: ignore[arg-type,misc]
    known = _known(answers, registers)
    if known is not None:  # and now what a majority of its members agrees upon: one may know of a try that came to nothing
        if not set(known.everyone) <= set(registers):
            return known
        value = ledger(registers, own(known), fan_out, seconds).read([NAME])[NAME]
        return known if value is None else decode(value)
    if errors:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise Unavailable(
            f"{len(answers)} of {len(registers)} members answer, which is too few to know what they hold together ({reasons}); "
            "start the missing ones (all of them when a namespace is used for the first time)"
        )
    ring = Ring(1, tuple(Spot(s.name, s.domain) for s in spots), tolerated)
    _, errors = fan_out.ask({name: r.complete for name, r in registers.items()}, seconds)
    if errors:
        raise Unavailable(f"the namespace could not be made: {'; '.join(map(str, errors.values()))}")
    # All must take it: another client that knows of fewer members, or of more, finds it on any of them.
    all_of_them = Keepers((Group(tuple(sorted(registers)), Quorum(len(registers), len(registers), 1)),))
    made = ledger(registers, all_of_them, fan_out, seconds).update(
        [NAME], lambda _, value: encode(ring) if value is None else None, fresh=True
    )[NAME]
    assert made is not None
    return decode(made)


def _known(answers: Mapping[str, list[object]], registers: Mapping[str, Registers]) -> Ring | None:
    """The newest ring, if as many of its members have answered as must, so that there is none newer."""
    rings = []
    for given in answers.values():
        record = given[0]
        if isinstance(record, Record) and record.value is not None:
            rings.append((record.accepted, decode(record.value)))
    if not rings:
        return None
    _, newest = max(rings, key=lambda r: r[0])
    voted = {name for name, given in answers.items() if name in registers and isinstance(given[0], Record)}
    for ring in (newest.before or newest, newest):  # a next one needs a majority of each
        if sum(spot.name in voted for spot in ring.members) >= len(ring.members) - len(ring.members) // 2:
            return newest
    return None


def encode(ring: Ring) -> Value:
    def packed(ring: Ring) -> list[Any]:
        return [ring.epoch, [[s.name, list(s.domain)] for s in ring.members], ring.tolerated]

    return Value(msgpack.packb(packed(ring) + ([packed(ring.before)] if ring.before else [])))


def decode(value: Value) -> Ring:
    def unpacked(epoch: int, members: list[Any], tolerated: int, before: list[Any] | None = None) -> Ring:
        spots = tuple(Spot(name, tuple(domain)) for name, domain in members)
        return Ring(epoch, spots, tolerated, unpacked(*before) if before else None)

    try:
        return unpacked(*msgpack.unpackb(value.head))
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"the record of the members can't be read: {error}") from error
