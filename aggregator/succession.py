"""Other members for the records of a namespace: one that is gone for ever leaves, new ones come, more keep each record than
before, while clients go on.

A change has two steps, each a new ring that a majority of the old members, and in the second of the new ones too, accepts:

1. *moving*: what is agreed must be agreed by the old and by the new keepers of a path. Once the old members are fenced, so that
   nobody goes by the old ring any more, every record is settled, which puts it on its new keepers.
2. *moved*: the new members keep the records. They and the old ones are fenced again, and forget what others keep now.

Whoever goes by an older ring is told so by a fenced member, and asks for the ring anew. Of those that can't be fenced
there must be fewer than a quorum for anything. Killed anywhere, the change is taken up where it was by the next one, or by
a repair.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ckpt.aggregator import ring as rings
from ckpt.aggregator.namespace import Namespace
from ckpt.aggregator.placement import Spot
from ckpt.aggregator.redundancy import Redundancy
from ckpt.aggregator.ring import Ring
from ckpt.storage.errors import Changed, InvalidArgument, StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.registers import ABSENT, Damaged, Record, is_final

log = logging.getLogger("ckpt")

Progress = Callable[[int], None]

_BATCH = 1_000


def succeed(
    namespace: Namespace, spots: Iterable[Spot], gone: str = "", destroyed: bool = False,
    progress: Progress = lambda _: None, tolerated: int = 0,
) -> Ring:  # fmt: skip
    """Let these members keep the records from now on. progress: called with the number of records just moved.

    tolerated: how many members may be lost, if that is more than before: as many more keep each record.

    gone: a member that is taken out, to which nobody writes any more. destroyed: it never comes back, which must be said for
    a namespace of two, where the other can't decide alone.
    """
    namespace.renew()
    old = namespace.ring
    members = tuple(Spot(s.name, s.domain) for s in sorted(spots, key=lambda s: s.name))
    names = {s.name for s in members}
    left_out = tuple(sorted(({*old.gone, gone} - names) - {""}))
    tolerated = max(tolerated, old.tolerated)
    if set(members) == set(old.members) and (left_out, tolerated) == (old.gone, old.tolerated):
        return finish(namespace, gone if destroyed else "", progress)
    if not members:
        raise InvalidArgument(f"{namespace.url}: someone must keep the records; name a member that stays")
    if names != {s.name for s in old.members}:
        namespace.meet(namespace.config.access.deadline_seconds, everyone=True)
        namespace.check_devices(names)
        _invite(namespace, old, names)
    before = old.before or replace(old, agreed_by=None, fenced=0)
    if destroyed and len(before.members) == 2:  # the other has all that was ever agreed, for it took both
        before = replace(before, members=tuple(s for s in before.members if s.name != gone))
    _decide(namespace, old, rings.successor(old, members, before, left_out, tolerated), gone if destroyed else "")
    return finish(namespace, gone if destroyed else "", progress)


def secure(namespace: Namespace, redundancy: Redundancy) -> None:
    """See to it that records outlive as many members as what is written with this redundancy: if the namespace was made for
    less, more members keep each record from now on. One of those who find that at the same time does it, the others wait.

    Raises Unavailable where too few of them answer.
    """
    tolerated, patience = redundancy.tolerated, namespace.config.access.deadline_seconds
    seen, until = 0, 0.0
    while not (ring := namespace.ring).bears(tolerated, len(namespace.spots)):
        members = list(namespace.placed(ring.members))
        if len(members) < 2 * tolerated:
            members += [s for s in namespace.spots if s.name not in ring.everyone]
        if ring.epoch > seen:
            seen, until = ring.epoch, time.monotonic() + patience * random.uniform(0.5, 1)
        if ring.before is not None and time.monotonic() < until:  # somebody is at it, or was killed
            time.sleep(0.05)
            namespace.renew()
            continue
        log.warning("%s was made for less than %s: more members keep each record now", namespace.url, redundancy)
        try:
            succeed(namespace, members, tolerated=tolerated)
        except Changed:
            namespace.renew()
        except Unavailable as error:
            namespace.renew()
            told = f"{namespace.url} was made for less than {redundancy}, and more members can't keep its records now: {error}"
            raise Unavailable(told) from error


def _invite(namespace: Namespace, old: Ring, names: set[str]) -> None:
    """See to it that all who are to keep records can: a change towards members that do not answer would come to no end."""

    strangers: list[str] = []

    def ask(name: str) -> None:
        registers = namespace.places[name].registers
        (known,) = registers.read([ABSENT])
        if name in old.everyone:
            if isinstance(known, Damaged):
                raise Unavailable(f"its records were lost; repair {namespace.url} first")
            return
        finals = [r.value for _, r in registers.scan(rings.PREFIX) if isinstance(r, Record) and r.value and is_final(r)]
        strange = any(rings.decode(value).namespace != old.namespace for value in finals)
        if strange or (not finals and registers.scan("/", limit=1)):
            strangers.append(name)
            return
        registers.learn(old.name, rings.encode(old))  # who votes on the rings that come must know of those that were
        registers.join(old.next_number, rings.PREFIX)

    _, errors = namespace.fan_out.ask({name: partial(ask, name) for name in names}, namespace.commit_seconds)
    if strangers:
        raise InvalidArgument(
            f"{', '.join(sorted(strangers))} holds records of another namespace; empty its folder, or leave it out"
        )
    if errors:
        raise Unavailable(f"not all who are to keep records can: {_told(errors)}; start them, or leave them out")
    failpoint("ring.joined")


def finish(namespace: Namespace, destroyed: str = "", progress: Progress = lambda _: None) -> Ring:
    """Complete a change that is under way, if there is one."""
    namespace.renew()
    moving = namespace.ring
    if moving.before is None:
        return moving
    failpoint("ring.moving")
    _fence(namespace, moving.before, moving.epoch, destroyed)
    failpoint("ring.fenced")
    answers, _ = namespace.scan("")
    found = {name for records in answers.values() for name, _ in records}
    names = sorted(name for name in found if not name.startswith(rings.PREFIX))
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        namespace.settle(batch, everywhere=False)
        progress(len(batch))
        failpoint("ring.settled")
    moved = rings.successor(moving, moving.members, None, moving.gone, moving.tolerated)
    _decide(namespace, moving, moved, destroyed)
    failpoint("ring.moved")
    _fence(namespace, moving.before, moved.epoch, destroyed)
    _forget(namespace, moving, moved, names)
    log.warning("the records of %s are kept by %s now", namespace.url, ", ".join(s.name for s in moved.members))
    return moved


def _decide(namespace: Namespace, old: Ring, new: Ring, destroyed: str) -> None:
    registers = {name: namespace.places[name].registers for name in {**old.everyone, **new.everyone}}
    seconds = namespace.config.access.deadline_seconds
    ledger = rings.ledger(registers, rings.electors(old, destroyed), namespace.fan_out, seconds)
    wanted = rings.encode(new)
    value = ledger.update([new.name], lambda _, there: wanted if there is None else None, fresh=True)[new.name]
    namespace.renew()
    if value != wanted:
        raise Changed(f"the members that keep the records of {namespace.url} were changed by someone else; look, and try again")
    failpoint("ring.decided")
    told = rings.spread(registers, new, namespace.fan_out, seconds)
    if new.before is None and 2 * sum(s.name in told for s in new.members) <= len(new.members):
        raise Unavailable(f"most of the new members, {', '.join(new.everyone)}, do not answer any more; start them")


def _fence(namespace: Namespace, ring: Ring, epoch: int, destroyed: str) -> None:
    """See to it that nobody agrees on anything by an older ring."""
    calls = {s.name: partial(namespace.places[s.name].registers.fence, epoch) for s in ring.members if s.name != destroyed}
    _, errors = namespace.fan_out.ask(calls, namespace.commit_seconds)
    if len(errors) >= min(ring.quorum.write, ring.quorum.read):
        raise Unavailable(
            f"too many members that keep records are missing to change who keeps them: {_told(errors)}; start them, "
            "and run it again"
        )


def _forget(namespace: Namespace, moving: Ring, moved: Ring, names: list[str]) -> None:
    """Let members forget records that they do not keep any more. What can't be forgotten now does no harm."""

    def forget(member: str) -> None:
        registers = namespace.places[member].registers
        registers.fence(moved.epoch)
        strange = [name for name in names if member not in moved.keepers(name).members]
        registers.drop(strange, moved.epoch)

    _, errors = namespace.fan_out.ask({m: partial(forget, m) for m in moving.everyone}, namespace.commit_seconds)
    for member, error in errors.items():
        log.info("%s keeps old records: %s", member, error)


def _told(errors: dict[str, StoreError]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in errors.items())
