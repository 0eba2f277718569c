"""Changes of the record ring: records move to other members, or to more of them, while clients continue.

A member that is removed leaves the ring, and new members join it. A change makes two new rings. A majority of the old members
accepts each of them, and most of the new members must have the second:

1. *moving*: each change of a record must be agreed by its old and by its new replica set. The old members are fenced, so that
   no client uses the old ring any more. Then every record is settled, which writes it to its new replica set.
2. *moved*: only the new members keep the records. The old and the new members are fenced again, and forget the records that
   other members keep now. Members that lack a record get it.

A fenced member refuses a call under an older ring, and the client reads the ring again. The members that can't be fenced must
be fewer than any quorum. If the process is killed, the next ring change or a repair completes the change.
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
from ckpt.aggregator.records import record_ring
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.paxos import BATCH_PATHS
from ckpt.aggregator.records.record_ring import RecordRing
from ckpt.aggregator.records.replica_set import QuorumDamaged, ballots_by_name, is_lagging
from ckpt.storage.base.errors import Changed, InvalidArgument, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.plural import first_few, format_count
from ckpt.storage.registers.base import ABSENT_NAME, DamagedRegister, Register, is_final

log = logging.getLogger("ckpt")

RecordProgress = Callable[[int], None]
"""Called with the number of records that have just moved."""


class RecordsNotMoved(Unavailable):
    """Too few members have some records undamaged. The new members have all others, and the ring change is not complete."""


def change_ring(
    records: NamespaceRecords, locations: Iterable[MemberLocation], removed_member: str = "", is_destroyed: bool = False,
    progress: RecordProgress = lambda _: None, tolerated_losses: int = 0,
) -> RecordRing:  # fmt: skip
    """Move the records to these members, and return the new ring.

    removed_member: a member that is removed from the namespace, to which nobody writes any more. is_destroyed: its device never
    comes back; required in a namespace of two members, where the other can't decide alone. progress: called with the number of
    records just moved. tolerated_losses: how many members may be lost, if that is more than before.

    Raises InvalidArgument, Unavailable, its subclass RecordsNotMoved where only damaged records did not move, and Changed if
    another client changed the ring at the same time.
    """
    records.invalidate_ring()
    old = records.ring
    members = tuple(MemberLocation(member.name, member.domain) for member in sorted(locations, key=lambda member: member.name))
    names = {member.name for member in members}
    removed_members = tuple(sorted(({*old.removed_members, removed_member} - names) - {""}))
    tolerated_losses = max(tolerated_losses, old.tolerated_losses)
    if set(members) == set(old.members) and (removed_members, tolerated_losses) == (old.removed_members, old.tolerated_losses):
        return complete_ring_change(records, removed_member if is_destroyed else "", progress)
    if not members:
        raise InvalidArgument(f"{records.url}: no member is left to keep the records; name a member that stays")
    if names != {member.name for member in old.members}:
        records.update_domains(records.config.credentials.deadline_seconds, wait_for_all=True)
        records.check_devices(names)
        _prepare_members(records, old, names)
    previous = old.previous or replace(old, agreed_by=None, member_fence_number=0)
    if is_destroyed and len(previous.members) == 2:  # every change took both members, so the other one has all records
        previous = replace(previous, members=tuple(member for member in previous.members if member.name != removed_member))
    _agree_on_ring(
        records,
        old,
        record_ring.next_ring(old, members, previous, removed_members, tolerated_losses),
        removed_member if is_destroyed else "",
    )
    return complete_ring_change(records, removed_member if is_destroyed else "", progress)


def ensure_record_redundancy(records: NamespaceRecords, redundancy: Redundancy) -> None:
    """Make sure that records tolerate as many losses as files with this redundancy: enlarge their replica sets if needed.

    If several clients find it necessary, one does it and the others wait. Raises Unavailable if too few members answer.
    """
    tolerated, patience = redundancy.tolerated_losses, records.config.credentials.deadline_seconds
    last_epoch, takeover_at = 0, 0.0
    while not (ring := records.ring).can_tolerate(tolerated, len(records.locations)):
        members = list(records.with_known_domains(ring.members))
        if len(members) < 2 * tolerated:
            members += [member for member in records.locations if member.name not in ring.all_members]
        if ring.epoch > last_epoch:
            last_epoch, takeover_at = ring.epoch, time.monotonic() + patience * random.SystemRandom().uniform(0.5, 1)
        if ring.previous is not None and time.monotonic() < takeover_at:  # another client changes the ring, or was killed
            time.sleep(0.05)
            records.invalidate_ring()
            continue
        log.warning(
            "%s keeps its records for fewer lost members than %s needs: more members keep each record now",
            records.url, redundancy,
        )  # fmt: skip
        try:
            change_ring(records, members, tolerated_losses=tolerated)
        except Changed:
            records.invalidate_ring()
        except Unavailable as error:
            records.invalidate_ring()
            raise Unavailable(
                f"the records of {records.url} tolerate fewer losses than {redundancy} and can't move to more members now: "
                f"{error}"
            ) from error


def _prepare_members(records: NamespaceRecords, old: RecordRing, names: set[str]) -> None:
    """Prepare all members of the new ring to keep records. A change to members that do not answer could not complete."""

    foreign_members: list[str] = []

    def prepare(name: str) -> None:
        registers = records.open_members[name].registers
        (absent_answer,) = registers.read([ABSENT_NAME])
        if name in old.all_members:
            if isinstance(absent_answer, DamagedRegister):
                raise Unavailable(f"its records were lost; repair {records.url} first")
            return
        finals = [
            r.value for _, r in registers.scan(record_ring.RING_PREFIX) if isinstance(r, Register) and r.value and is_final(r)
        ]
        is_foreign = any(record_ring.decode_ring(value).namespace != old.namespace for value in finals)
        if is_foreign or (not finals and registers.scan("/", limit=1)):
            foreign_members.append(name)
            return
        # A member that votes on later rings must have the earlier one.
        registers.learn(old.register_name, record_ring.encode_ring(old))
        registers.join_ring(old.next_fence_number, record_ring.RING_PREFIX)

    _, errors = records.fan_out.ask({name: partial(prepare, name) for name in names}, records.commit_timeout_seconds)
    if foreign_members:
        raise InvalidArgument(
            f"these members have records of another namespace: {', '.join(sorted(foreign_members))}; empty their folders, or "
            "leave them out"
        )
    if errors:
        raise Unavailable(f"some of the new members can't keep records: {_join_errors(errors)}; start them, or leave them out")
    failpoint("ring.joined")


def complete_ring_change(
    records: NamespaceRecords, destroyed: str = "", progress: RecordProgress = lambda _: None
) -> RecordRing:
    """Complete a ring change that was begun, if there is one, and return the current ring.

    Raises Unavailable, its subclass RecordsNotMoved where only damaged records did not move, and Changed.
    """
    records.invalidate_ring()
    moving = records.ring
    if moving.previous is None:
        return moving
    failpoint("ring.moving")
    _fence_ring(records, moving.previous, moving.epoch, destroyed)
    failpoint("ring.fenced")
    # A member that missed its fence could otherwise accept a change of the old ring after it has listed its records.
    answers, _ = records.scan("", is_fencing=True)
    found = {name for scanned in answers.values() for name, _ in scanned}
    names = sorted(name for name in found if not name.startswith(record_ring.RING_PREFIX))
    damaged: dict[str, str] = {}
    for start in range(0, len(names), BATCH_PATHS):
        batch = names[start : start + BATCH_PATHS]
        failed = _settle_undamaged(records, batch)
        progress(len(batch) - len(failed))
        damaged |= failed
        failpoint("ring.settled")
    if damaged:  # the members that have what is left of these records keep their part in the ring
        raise RecordsNotMoved(
            f"{format_count(len(damaged), 'record')} can't be copied to other members ({first_few([*damaged], 10)}); the other "
            f"records are: {next(iter(damaged.values()))}"
        )
    moved = record_ring.next_ring(moving, moving.members, None, moving.removed_members, moving.tolerated_losses)
    _agree_on_ring(records, moving, moved, destroyed)
    failpoint("ring.moved")
    _fence_ring(records, moving.previous, moved.epoch, destroyed)
    _drop_moved_records(records, moving, moved, names)
    _settle_lagging_members(records, moved)
    log.warning("the records of %s are kept by %s now", records.url, ", ".join(member.name for member in moved.members))
    return moved


def _settle_undamaged(records: NamespaceRecords, names: list[str]) -> dict[str, str]:
    """Write records to a quorum of their replica sets. Return the reason for each that too few members have undamaged.

    One such record makes the call for a whole batch fail, so the batch is halved until it is alone.
    """
    try:
        records.settle(names, on_all_members=False)
    except QuorumDamaged as error:
        if len(names) == 1:
            return {names[0]: str(error)}
        half = len(names) // 2
        return _settle_undamaged(records, names[:half]) | _settle_undamaged(records, names[half:])
    return {}


def _agree_on_ring(records: NamespaceRecords, old: RecordRing, new: RecordRing, destroyed: str) -> None:
    registers = {name: records.open_members[name].registers for name in {**old.all_members, **new.all_members}}
    seconds = records.config.credentials.deadline_seconds
    registers_of_rings = record_ring.ring_registers(
        registers, record_ring.ring_electors(old, destroyed), records.fan_out, seconds
    )
    proposed = record_ring.encode_ring(new)
    value = registers_of_rings.update(
        [new.register_name], lambda _, current: proposed if current is None else None, expect_absent=True
    )[new.register_name]
    records.invalidate_ring()
    if value != proposed:
        raise Changed(
            f"the members that keep the records of {records.url} were changed by another client; check, and try again"
        )
    failpoint("ring.decided")
    informed = record_ring.publish_ring(registers, new, records.fan_out, seconds)
    if new.previous is None and 2 * sum(member.name in informed for member in new.members) <= len(new.members):
        raise Unavailable(f"most of the new members ({', '.join(new.all_members)}) do not answer any more; start them")


def _fence_ring(records: NamespaceRecords, ring: RecordRing, epoch: int, destroyed: str) -> None:
    """Fence the members of a ring, so that nothing can be agreed under an older ring any more."""
    calls = {
        member.name: partial(records.open_members[member.name].registers.fence, epoch)
        for member in ring.members
        if member.name != destroyed
    }
    _, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
    if len(errors) >= min(ring.quorum.write, ring.quorum.read):
        raise Unavailable(
            f"the records can't move, as too many members that keep them do not answer: {_join_errors(errors)}; start them, "
            "and run it again"
        )


def _drop_moved_records(records: NamespaceRecords, moving: RecordRing, moved: RecordRing, names: list[str]) -> None:
    """Let members forget records that they do not keep any more. Records that stay on a member do no harm."""

    def forget(member: str) -> None:
        registers = records.open_members[member].registers
        registers.fence(moved.epoch)
        moved_names = [name for name in names if member not in moved.replica_set(name).members]
        registers.drop(moved_names, moved.epoch)

    _, errors = records.fan_out.ask(
        {member: partial(forget, member) for member in moving.all_members}, records.commit_timeout_seconds
    )
    for member, error in errors.items():
        log.info("records that moved stay on %s: %s", member, error)


def _settle_lagging_members(records: NamespaceRecords, ring: RecordRing) -> None:
    """Write the records to the members of a new replica set that lack them.

    A record moved when a quorum of its new replica set had it. A member that was slower refuses it once the ring has changed.
    """
    try:
        answers, _ = records.scan("")
        lagging = [
            name
            for name, ballots in ballots_by_name(answers).items()
            if not name.startswith(record_ring.RING_PREFIX) and is_lagging(ring.replica_set(name), ballots, answers)
        ]
        records.settle(lagging)
    except (Unavailable, Changed) as error:  # a quorum has each record; a repair writes it to the others
        log.info("some records of %s are not on all members of their replica sets yet: %s", records.url, error)


def _join_errors(errors: dict[str, StoreError]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in errors.items())
