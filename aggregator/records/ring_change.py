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

from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation
from ckpt.aggregator.records import record_ring as rings
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.record_ring import RecordRing
from ckpt.storage.base.errors import Changed, InvalidArgument, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.base import ABSENT_NAME, DamagedRecord, Record, is_final

log = logging.getLogger("ckpt")

RecordProgress = Callable[[int], None]

_BATCH_RECORDS = 1_000


def change_ring(
    records: NamespaceRecords, locations: Iterable[MemberLocation], removed_member: str = "", is_destroyed: bool = False,
    progress: RecordProgress = lambda _: None, tolerated_losses: int = 0,
) -> RecordRing:  # fmt: skip
    """Let these members keep the records from now on. progress: called with the number of records just moved.

    tolerated: how many members may be lost, if that is more than before: as many more keep each record.

    gone: a member that is taken out, to which nobody writes any more. destroyed: it never comes back, which must be said for
    a namespace of two, where the other can't decide alone.
    """
    records.invalidate_ring()
    old = records.ring
    members = tuple(MemberLocation(s.name, s.domain) for s in sorted(locations, key=lambda s: s.name))
    names = {s.name for s in members}
    removed_members = tuple(sorted(({*old.removed_members, removed_member} - names) - {""}))
    tolerated_losses = max(tolerated_losses, old.tolerated_losses)
    if set(members) == set(old.members) and (removed_members, tolerated_losses) == (old.removed_members, old.tolerated_losses):
        return complete_ring_change(records, removed_member if is_destroyed else "", progress)
    if not members:
        raise InvalidArgument(f"{records.url}: someone must keep the records; name a member that stays")
    if names != {s.name for s in old.members}:
        records.update_domains(records.config.credentials.deadline_seconds, wait_for_all=True)
        records.check_devices(names)
        _prepare_members(records, old, names)
    previous = old.previous or replace(old, agreed_by=None, member_fence_number=0)
    if is_destroyed and len(previous.members) == 2:  # the other has all that was ever agreed, for it took both
        previous = replace(previous, members=tuple(s for s in previous.members if s.name != removed_member))
    _agree_on_ring(
        records,
        old,
        rings.next_ring(old, members, previous, removed_members, tolerated_losses),
        removed_member if is_destroyed else "",
    )
    return complete_ring_change(records, removed_member if is_destroyed else "", progress)


def ensure_record_redundancy(records: NamespaceRecords, redundancy: Redundancy) -> None:
    """See to it that records outlive as many members as what is written with this redundancy: if the namespace was made for
    less, more members keep each record from now on. One of those who find that at the same time does it, the others wait.

    Raises Unavailable where too few of them answer.
    """
    tolerated, patience = redundancy.tolerated_losses, records.config.credentials.deadline_seconds
    last_epoch, takeover_at = 0, 0.0
    while not (ring := records.ring).can_tolerate(tolerated, len(records.locations)):
        members = list(records.with_known_domains(ring.members))
        if len(members) < 2 * tolerated:
            members += [s for s in records.locations if s.name not in ring.all_members]
        if ring.epoch > last_epoch:
            last_epoch, takeover_at = ring.epoch, time.monotonic() + patience * random.uniform(0.5, 1)
        if ring.previous is not None and time.monotonic() < takeover_at:  # somebody is at it, or was killed
            time.sleep(0.05)
            records.invalidate_ring()
            continue
        log.warning("%s was made for less than %s: more members keep each record now", records.url, redundancy)
        try:
            change_ring(records, members, tolerated_losses=tolerated)
        except Changed:
            records.invalidate_ring()
        except Unavailable as error:
            records.invalidate_ring()
            message = f"{records.url} was made for less than {redundancy}, and more members can't keep its records now: {error}"
            raise Unavailable(message) from error


def _prepare_members(records: NamespaceRecords, old: RecordRing, names: set[str]) -> None:
    """See to it that all who are to keep records can: a change towards members that do not answer would come to no end."""

    foreign_members: list[str] = []

    def ask(name: str) -> None:
        registers = records.open_members[name].registers
        (absent_answer,) = registers.read([ABSENT_NAME])
        if name in old.all_members:
            if isinstance(absent_answer, DamagedRecord):
                raise Unavailable(f"its records were lost; repair {records.url} first")
            return
        finals = [r.value for _, r in registers.scan(rings.RING_PREFIX) if isinstance(r, Record) and r.value and is_final(r)]
        is_foreign = any(rings.decode_ring(value).namespace != old.namespace for value in finals)
        if is_foreign or (not finals and registers.scan("/", limit=1)):
            foreign_members.append(name)
            return
        registers.learn(
            old.register_name, rings.encode_ring(old)
        )  # who votes on the rings that come must know of those that were
        registers.join_ring(old.next_fence_number, rings.RING_PREFIX)

    _, errors = records.fan_out.ask({name: partial(ask, name) for name in names}, records.commit_timeout_seconds)
    if foreign_members:
        raise InvalidArgument(
            f"{', '.join(sorted(foreign_members))} holds records of another namespace; empty its folder, or leave it out"
        )
    if errors:
        raise Unavailable(f"not all who are to keep records can: {_join_errors(errors)}; start them, or leave them out")
    failpoint("ring.joined")


def complete_ring_change(
    records: NamespaceRecords, destroyed: str = "", progress: RecordProgress = lambda _: None
) -> RecordRing:
    """Complete a change that is under way, if there is one."""
    records.invalidate_ring()
    moving = records.ring
    if moving.previous is None:
        return moving
    failpoint("ring.moving")
    _fence_ring(records, moving.previous, moving.epoch, destroyed)
    failpoint("ring.fenced")
    answers, _ = records.scan("")
    found = {name for scanned in answers.values() for name, _ in scanned}
    names = sorted(name for name in found if not name.startswith(rings.RING_PREFIX))
    for start in range(0, len(names), _BATCH_RECORDS):
        batch = names[start : start + _BATCH_RECORDS]
        records.settle(batch, on_all_members=False)
        progress(len(batch))
        failpoint("ring.settled")
    moved = rings.next_ring(moving, moving.members, None, moving.removed_members, moving.tolerated_losses)
    _agree_on_ring(records, moving, moved, destroyed)
    failpoint("ring.moved")
    _fence_ring(records, moving.previous, moved.epoch, destroyed)
    _drop_moved_records(records, moving, moved, names)
    log.warning("the records of %s are kept by %s now", records.url, ", ".join(s.name for s in moved.members))
    return moved


def _agree_on_ring(records: NamespaceRecords, old: RecordRing, new: RecordRing, destroyed: str) -> None:
    registers = {name: records.open_members[name].registers for name in {**old.all_members, **new.all_members}}
    seconds = records.config.credentials.deadline_seconds
    registers_of_rings = rings.ring_registers(registers, rings.ring_electors(old, destroyed), records.fan_out, seconds)
    proposed = rings.encode_ring(new)
    value = registers_of_rings.update(
        [new.register_name], lambda _, there: proposed if there is None else None, expect_absent=True
    )[new.register_name]
    records.invalidate_ring()
    if value != proposed:
        raise Changed(f"the members that keep the records of {records.url} were changed by someone else; look, and try again")
    failpoint("ring.decided")
    informed = rings.publish_ring(registers, new, records.fan_out, seconds)
    if new.previous is None and 2 * sum(s.name in informed for s in new.members) <= len(new.members):
        raise Unavailable(f"most of the new members, {', '.join(new.all_members)}, do not answer any more; start them")


def _fence_ring(records: NamespaceRecords, ring: RecordRing, epoch: int, destroyed: str) -> None:
    """See to it that nobody agrees on anything by an older ring."""
    calls = {s.name: partial(records.open_members[s.name].registers.fence, epoch) for s in ring.members if s.name != destroyed}
    _, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
    if len(errors) >= min(ring.quorum.write, ring.quorum.read):
        raise Unavailable(
            f"too many members that keep records are missing to change who keeps them: {_join_errors(errors)}; start them, "
            "and run it again"
        )


def _drop_moved_records(records: NamespaceRecords, moving: RecordRing, moved: RecordRing, names: list[str]) -> None:
    """Let members forget records that they do not keep any more. What can't be forgotten now does no harm."""

    def forget(member: str) -> None:
        registers = records.open_members[member].registers
        registers.fence(moved.epoch)
        moved_names = [name for name in names if member not in moved.replica_set(name).members]
        registers.drop(moved_names, moved.epoch)

    _, errors = records.fan_out.ask({m: partial(forget, m) for m in moving.all_members}, records.commit_timeout_seconds)
    for member, error in errors.items():
        log.info("%s keeps old records: %s", member, error)


def _join_errors(errors: dict[str, StoreError]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in errors.items())
