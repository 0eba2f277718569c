"""Which members keep the records of which paths. Agreed, kept by every member, and the same for every client.

Fragments may lie anywhere, for a record says where. A record must be found without being told, so that what decides its
place may not differ between clients. Each ring is a register of its own, `ring/<number>`, under a name that no path has: the
members of the ring before agree on it, once and for ever, and all that is agreed by others is agreed in another register. So
the newest ring is the one at the end of the chain, and who knows an old one is led on. `aggregator/succession.py` makes the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.ledger import Group, Keepers, Ledger
from ckpt.aggregator.placement import Spot, choose
from ckpt.aggregator.redundancy import Quorum, quorum
from ckpt.storage.errors import IntegrityError, Unavailable
from ckpt.storage.registers import Answer, Ballot, Record, Registers, Value, is_final

PREFIX = "ring/"


@dataclass(frozen=True, slots=True)
class Ring:
    """The members that keep records, and how many of them may be lost."""

    epoch: int
    members: tuple[Spot, ...]
    tolerated: int
    before: Ring | None = None
    """While records move to these members: those that keep them all."""
    agreed_by: Ring | None = None
    """The ring whose members agreed on this one; None where all of its own did."""

    @property
    def name(self) -> str:
        """Of its register."""
        return f"{PREFIX}{self.epoch:010d}"

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


def successor(ring: Ring, members: tuple[Spot, ...], before: Ring | None = None) -> Ring:
    """A ring that may come after this one."""
    return Ring(ring.epoch + 1, members, ring.tolerated, before, replace(ring, agreed_by=None))


def electors(ring: Ring, without: str = "") -> Keepers:
    """Who agrees on the ring after this one: a majority of its members, and while records move of those before, too.

    without: one that is destroyed, and needs not be asked.
    """
    groups = []
    for each in (ring.before, ring):
        if each is not None:
            names = sorted(s.name for s in each.members)
            left = tuple(name for name in names if name != without)
            write, read = len(names) // 2 + 1, len(names) - len(names) // 2
            groups.append(Group(left, Quorum(len(left), min(write, len(left)), min(read, len(left)))))
    return Keepers(tuple(groups))


def ledger(registers: Mapping[str, Registers], keepers: Keepers, fan_out: FanOut, seconds: float) -> Ledger:
    """For rings."""
    return Ledger(registers, lambda paths: dict.fromkeys(paths, keepers), fan_out, seconds)


Told = Sequence[tuple[str, Answer]]
"""What a member knows of rings, and its answer for one that is not there."""


def find(registers: Mapping[str, Registers], spots: tuple[Spot, ...], tolerated: int, fan_out: FanOut, seconds: float) -> Ring:
    """The newest ring of a namespace; made of all members where there is none yet, for which all must answer."""

    def tell(of: Registers) -> Told:
        return [*of.scan(PREFIX), *zip([""], of.read([f"{PREFIX}{0:010d}"]), strict=True)]

    calls: dict[str, Callable[[], Told]] = {name: partial(tell, each) for name, each in registers.items()}
    answers, errors = fan_out.ask(calls, seconds, lambda got: _last(got) is not None)
    known = _known(answers)
    for ring in known:
        # A member may know of a try that came to nothing.
        agreed = ring if _is_final(answers, ring) else _settled(registers, ring, fan_out, seconds)
        if agreed is not None and (_is_last(answers, agreed) or ring is not known[0]):
            return agreed
        if agreed is not None:
            break
    if errors or known:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise Unavailable(
            f"{len(answers)} of {len(registers)} members answer, which is too few to know what they hold together ({reasons}); "
            "start the missing ones (all of them when a namespace is used for the first time)"
        )
    return _make(registers, spots, tolerated, fan_out, seconds)


def _make(
    registers: Mapping[str, Registers], spots: tuple[Spot, ...], tolerated: int, fan_out: FanOut, seconds: float
) -> Ring:
    ring = Ring(1, tuple(Spot(s.name, s.domain) for s in spots), tolerated)
    _, errors = fan_out.ask({name: r.complete for name, r in registers.items()}, seconds)
    if errors:
        raise Unavailable(f"the namespace could not be made: {'; '.join(map(str, errors.values()))}")
    made = ledger(registers, _founders(ring), fan_out, seconds).update(
        [ring.name], lambda _, value: encode(ring) if value is None else None, fresh=True
    )[ring.name]
    assert made is not None
    found = decode(made)
    spread(registers, found, fan_out, seconds)
    return found


def _founders(ring: Ring) -> Keepers:
    """All must take the first ring: a client that knows of fewer members, or of more, finds it on any of them."""
    names = tuple(sorted(spot.name for spot in ring.members))
    return Keepers((Group(names, Quorum(len(names), len(names), 1)),))


def spread(registers: Mapping[str, Registers], ring: Ring, fan_out: FanOut, seconds: float) -> None:
    """Let all members of a ring that was agreed upon know of it. Who can't be told now is told by others."""
    value = encode(ring)
    calls = {n: partial(registers[n].learn, ring.name, value) for n in ring.everyone if n in registers}
    fan_out.ask(calls, seconds, spare=True)


def _settled(registers: Mapping[str, Registers], ring: Ring, fan_out: FanOut, seconds: float) -> Ring | None:
    """What those who agree on a ring of this number have agreed upon; None where it is nothing."""
    keepers = _founders(ring) if ring.agreed_by is None else electors(ring.agreed_by)
    if unknown := sorted(set(keepers.members) - set(registers)):
        raise Unavailable(f"{', '.join(unknown)} keep records too, as the others say; name all of them")
    value = ledger(registers, keepers, fan_out, seconds).read([ring.name])[ring.name]
    if value is None:
        return None
    agreed = decode(value)
    spread(registers, agreed, fan_out, seconds)
    return agreed


def _known(answers: Mapping[str, Told]) -> list[Ring]:
    """The rings that any member knows of, agreed or not, one of each number, the newest first."""
    known: dict[int, tuple[bool, Ballot, Ring]] = {}
    for told in answers.values():
        for _, record in told:
            if isinstance(record, Record) and record.value is not None:
                ring = decode(record.value)
                each = is_final(record), record.accepted, ring
                known[ring.epoch] = max(each, known.get(ring.epoch, each), key=lambda k: k[:2])
    return [known[epoch][2] for epoch in sorted(known, reverse=True)]


def _is_final(answers: Mapping[str, Told], ring: Ring) -> bool:
    """Whether a member knows that a ring was agreed upon."""
    return any(name == ring.name and is_final(record) for told in answers.values() for name, record in told)


def _is_last(answers: Mapping[str, Told], ring: Ring) -> bool:
    """Whether as many of those who agree on the next ring have answered as must, so that there is none."""
    voting = {name for name, told in answers.items() if isinstance(told[-1][1], Record)}  # the others have forgotten
    return any(
        sum(m in voting for m in group.members) >= group.quorum.read for group in electors(ring).groups
    )


def _last(answers: Mapping[str, Told]) -> Ring | None:
    """The newest ring, if these answers leave no doubt."""
    newest = next(iter(_known(answers)), None)
    return newest if newest is not None and _is_final(answers, newest) and _is_last(answers, newest) else None


def encode(ring: Ring) -> Value:
    return Value(msgpack.packb(_packed(ring)))


def decode(value: Value) -> Ring:
    try:
        return _unpacked(*msgpack.unpackb(value.head))
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"the record of the members can't be read: {error}") from error


def _packed(ring: Ring) -> list[Any]:
    members = [[s.name, list(s.domain)] for s in ring.members]
    return [ring.epoch, members, ring.tolerated, *(each and _packed(each) for each in (ring.before, ring.agreed_by))]


def _unpacked(
    epoch: int, members: list[Any], tolerated: int, before: list[Any] | None, agreed_by: list[Any] | None
) -> Ring:
    spots = tuple(Spot(name, tuple(domain)) for name, domain in members)
    others = (None if each is None else _unpacked(*each) for each in (before, agreed_by))
    return Ring(epoch, spots, tolerated, *others)
