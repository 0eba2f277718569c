"""Which members keep the records of which paths. Agreed, kept by every member, and the same for every client.

Fragments may lie anywhere, for a record says where. A record must be found without being told, so that what decides its
place may not differ between clients. Each ring is a register of its own, `ring/<number>`, under a name that no path has: the
members of the ring before agree on it, once and for ever, and all that is agreed by others is agreed in another register. So
the newest ring is the one at the end of the chain, and who knows an old one is led on. `aggregator/succession.py` makes the
next.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack

from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.ledger import Group, Keepers, Ledger
from ckpt.aggregator.placement import Spot, choose
from ckpt.aggregator.redundancy import Quorum, quorum
from ckpt.storage import fence_numbers
from ckpt.storage.errors import Changed, IntegrityError, InvalidArgument, Refused, Unavailable
from ckpt.storage.registers import ABSENT, Answer, Ballot, Record, Registers, Value, is_final

PREFIX = "ring/"


@dataclass(frozen=True, slots=True)
class Ring:
    """The members that keep records, and how many of them may be lost."""

    epoch: int
    members: tuple[Spot, ...]
    tolerated: int
    namespace: str
    """Random, drawn when the namespace was made: rings of different namespaces have nothing to do with each other."""
    before: Ring | None = None
    """While records move to these members: those that keep them all."""
    agreed_by: Ring | None = None
    """The ring whose members agreed on this one; None where all of its own did."""
    gone: tuple[str, ...] = ()
    """Members that were taken out: nobody writes to them any more, whatever his configuration says."""
    fenced: int = 0
    """The fence number that members had when the ring was read from them. Not a part of the record."""

    @property
    def number(self) -> int:
        """The fence number by which calls under this ring go (`storage/fence_numbers.py`)."""
        return fence_numbers.of_ring(self.epoch, self.fenced)

    @property
    def next_number(self) -> int:
        """The first fence number of the ring after this one."""
        return fence_numbers.raised(self.number, self.epoch + 1)

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
        return Keepers(tuple(Group(tuple(choose(path, r.members, r.quorum.members)), r.quorum) for r in rings), self.number)

    def bears(self, tolerated: int, available: int) -> bool:
        """Whether every record can be read after the loss of so many members, also while records move; as far as that goes with
        the members that are available: of twice as many as are lost, those left know what there is."""
        needed = min(2 * tolerated, available)
        rings = [ring for ring in (self.before, self) if ring]
        return all(needed <= len(r.members) and quorum(tolerated, len(r.members)).members <= r.quorum.members for r in rings)

    def can_list(self, answering: Collection[str]) -> bool:
        """Whether each record is on one of these members."""
        ring = self.before or self
        return sum(s.name not in answering for s in ring.members) < ring.quorum.write


def successor(ring: Ring, members: tuple[Spot, ...], before: Ring | None, gone: tuple[str, ...], tolerated: int) -> Ring:
    """A ring that may come after this one."""
    agreed_by = replace(ring, agreed_by=None, fenced=0)
    return Ring(ring.epoch + 1, members, tolerated, ring.namespace, before, agreed_by, gone)


def electors(ring: Ring, without: str = "") -> Keepers:
    """Who agrees on the ring after this one: a majority of its members, or while records move, of those before, which have all.

    without: one that is destroyed, and needs not be asked.
    """
    names = sorted(s.name for s in (ring.before or ring).members)
    left = tuple(name for name in names if name != without)
    write, read = len(names) // 2 + 1, len(names) - len(names) // 2
    return Keepers((Group(left, Quorum(len(left), min(write, len(left)), min(read, len(left)))),))


def ledger(registers: Mapping[str, Registers], keepers: Keepers, fan_out: FanOut, seconds: float) -> Ledger:
    """For rings."""
    return Ledger(registers, lambda paths: dict.fromkeys(paths, keepers), fan_out, seconds, direct=False)


Told = Sequence[tuple[str, Answer]]
"""What a member knows of rings, and its answer for one that is not there."""


class _UnderWay(Unavailable):
    """All members answer, and another client is about to agree upon a ring."""


def find(registers: Mapping[str, Registers], fan_out: FanOut, seconds: float, adopt: Callable[[Ring], bool]) -> Ring | None:
    """As `_find`; what another client is in the middle of is looked at again."""
    until = time.monotonic() + seconds
    while True:
        try:
            return _find(registers, fan_out, seconds, adopt)
        except _UnderWay:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _find(registers: Mapping[str, Registers], fan_out: FanOut, seconds: float, adopt: Callable[[Ring], bool]) -> Ring | None:
    """The newest ring of a namespace; None where all members answer, and none knows of one.

    adopt: called with a ring that names members which `registers` lacks; whether they were added. Raises Unavailable where too
    few members answer to be sure, InvalidArgument where they belong to different namespaces.
    """

    def tell(of: Registers) -> Told:
        return [*of.scan(PREFIX), *zip([""], of.read([f"{PREFIX}{0:010d}"]), strict=True)]

    while True:
        calls: dict[str, Callable[[], Told]] = {name: partial(tell, each) for name, each in registers.items()}
        answers, errors = fan_out.ask(calls, seconds, lambda got, calls=calls: _last(got, calls) is not None)  # type: ignore[misc]
        known = _known(answers)
        _check_one_namespace(answers)
        if not known or set(known[0].everyone) <= set(registers) or not adopt(known[0]):
            break
    for ring in known:
        # A member may know of a try that came to nothing.
        agreed = ring if _is_final(answers, ring) else _settled(registers, ring, fan_out, seconds)
        if agreed is not None and (_is_last(answers, agreed) or ring is not known[0]):
            return replace(agreed, fenced=_fenced(told[-1][1] for told in answers.values()))
        if agreed is not None:
            break
    for error in errors.values():
        if isinstance(error, Refused):  # a wrong token and the like, which no waiting mends
            raise error
    if errors or known:
        reasons = "; ".join(f"{name}: {error}" for name, error in errors.items())
        asked = f" of {', '.join(electors(known[0]).members)}" if known else ""
        raise (Unavailable if errors else _UnderWay)(
            f"{len(answers)} of {len(registers)} members answer, which is too few{asked} to know what they hold together "
            f"({reasons}); start the missing ones (all of them when a namespace is used for the first time)"
        )
    return None


def fence_number(ring: Ring, registers: Mapping[str, Registers], fan_out: FanOut, seconds: float) -> int:
    """The highest fence number of all members of a ring that answer."""
    calls = {name: partial(registers[name].read, [ABSENT]) for name in ring.everyone if name in registers}
    answers, _ = fan_out.ask(calls, seconds, will_do=bool, spare=True)
    return _fenced(answer for (answer,) in answers.values())


def _fenced(absent: Iterable[Answer]) -> int:
    """The highest fence number among members' answers for a register that does not exist; 0 where all are in era 0."""
    return max((answer.promised.round for answer in absent if isinstance(answer, Record)), default=0)


def _check_one_namespace(answers: Mapping[str, Told]) -> None:
    of: dict[str, list[str]] = {}
    for member, told in answers.items():
        for _, record in told:
            if isinstance(record, Record) and record.value is not None and is_final(record):
                names = of.setdefault(decode(record.value).namespace, [])
                if member not in names:
                    names.append(member)
    if len(of) > 1:
        groups = " and ".join(", ".join(names) for names in of.values())
        raise InvalidArgument(
            f"these members belong to different namespaces: {groups}; name those of one, and empty the folder of a member that "
            "is to join it and was used for something else"
        )


def make(registers: Mapping[str, Registers], spots: tuple[Spot, ...], tolerated: int, fan_out: FanOut, seconds: float) -> None:
    """The first ring, of all members, which must all answer; nothing where there is one already."""
    ring = Ring(1, tuple(Spot(s.name, s.domain) for s in spots), tolerated, secrets.token_hex(8))
    _, errors = fan_out.ask({name: r.complete for name, r in registers.items()}, seconds)
    if errors:
        raise Unavailable(f"the namespace could not be made: {'; '.join(map(str, errors.values()))}")
    made = ledger(registers, _founders(ring), fan_out, seconds).update(
        [ring.name], lambda _, value: encode(ring) if value is None else None, fresh=True
    )[ring.name]
    assert made is not None
    spread(registers, decode(made), fan_out, seconds)


def _founders(ring: Ring) -> Keepers:
    """All must take the first ring: a client that knows of fewer members, or of more, finds it on any of them."""
    names = tuple(sorted(spot.name for spot in ring.members))
    return Keepers((Group(names, Quorum(len(names), len(names), 1)),))


def spread(registers: Mapping[str, Registers], ring: Ring, fan_out: FanOut, seconds: float) -> Collection[str]:
    """Let all members of a ring that was agreed upon know of it; those that know. Who can't be told now is told by others."""
    value = encode(ring)
    calls = {n: partial(registers[n].learn, ring.name, value) for n in ring.everyone if n in registers}
    told, errors = fan_out.ask(calls, seconds, spare=True)
    for error in errors.values():
        if isinstance(error, Changed):
            raise error
    return told


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
    return electors(ring).can_read(voting)


def _last(answers: Mapping[str, Told], asked: Collection[str]) -> Ring | None:
    """The newest ring, if these answers leave no doubt: also none that it is that of most of those who were asked."""
    newest = next(iter(_known(answers)), None)
    if newest is None or not _is_final(answers, newest) or not _is_last(answers, newest):
        return None
    return newest if 2 * len(set(asked) & set(newest.everyone)) > len(asked) else None


def encode(ring: Ring) -> Value:
    return Value(msgpack.packb(_packed(ring)))


def decode(value: Value) -> Ring:
    try:
        return _unpacked(*msgpack.unpackb(value.head))
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"the record of the members can't be read: {error}") from error


def _packed(ring: Ring) -> list[Any]:
    members = [[s.name, list(s.domain)] for s in ring.members]
    others = [None if each is None else _packed(each) for each in (ring.before, ring.agreed_by)]
    return [ring.epoch, members, ring.tolerated, ring.namespace, *others, list(ring.gone)]


def _unpacked(
    epoch: int, members: list[Any], tolerated: int, namespace: str, before: list[Any] | None, agreed_by: list[Any] | None,
    gone: list[str], *_: Any,
) -> Ring:  # fmt: skip
    spots = tuple(Spot(name, tuple(domain)) for name, domain in members)
    first, second = (None if each is None else _unpacked(*each) for each in (before, agreed_by))
    return Ring(epoch, spots, tolerated, namespace, first, second, tuple(gone))
