"""Which members keep the records of which paths. Agreed once, kept by every member, and the same for every client.

Fragments may lie anywhere, for a record says where. A record must be found without being told, so that what decides its
place may not differ between clients: the ring is a register of its own, on all members, under a name that no path has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.ledger import Keepers, Ledger
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

    @property
    def quorum(self) -> Quorum:
        return quorum(self.tolerated, len(self.members))

    def keepers(self, path: str) -> Keepers:
        """The members that keep the record of a path, the first of them orders direct changes."""
        needed = self.quorum
        return Keepers(tuple(choose(path, self.members, needed.members)), needed)


def find(registers: Mapping[str, Registers], spots: tuple[Spot, ...], tolerated: int, fan_out: FanOut, seconds: float) -> Ring:
    """The ring of a namespace; made of all members where there is none yet, for which all must answer."""

    def enough(answers: Mapping[str, list[object]]) -> bool:
        return _known(answers, registers) is not None

    calls = {name: (lambda r=r: r.read([NAME])) for name, r in registers.items()}
    answers, errors = fan_out.ask(calls, seconds, enough)  # type: ignore[arg-type,misc]
    known = _known(answers, registers)
    if known is not None:  # and now what a majority of its members agrees upon: one may know of a try that came to nothing
        names = tuple(sorted(spot.name for spot in known.members))
        if not set(names) <= set(registers):
            return known
        value = _ledger(registers, names, fan_out, seconds).read([NAME])[NAME]
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
    made = _ledger(registers, tuple(sorted(registers)), fan_out, seconds).update(
        [NAME], lambda _, value: encode(ring) if value is None else None, fresh=True
    )[NAME]
    assert made is not None
    return decode(made)


def _ledger(registers: Mapping[str, Registers], names: tuple[str, ...], fan_out: FanOut, seconds: float) -> Ledger:
    """For the ring itself, which all its members keep."""
    majority = len(names) // 2 + 1
    keepers = Keepers(names, Quorum(len(names), majority, majority))
    return Ledger(registers, lambda _: keepers, fan_out, seconds)


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
    heard = sum(
        isinstance(answers[spot.name][0], Record) for spot in newest.members if spot.name in registers and spot.name in answers
    )
    return newest if 2 * heard > len(newest.members) or len(newest.members) <= 2 else None


def encode(ring: Ring) -> Value:
    members = [[s.name, list(s.domain)] for s in ring.members]
    return Value(msgpack.packb([ring.epoch, members, ring.tolerated]))


def decode(value: Value) -> Ring:
    try:
        epoch, members, tolerated = msgpack.unpackb(value.head)
        return Ring(epoch, tuple(Spot(name, tuple(domain)) for name, domain in members), tolerated)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"the record of the members can't be read: {error}") from error
