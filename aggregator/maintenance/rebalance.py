"""The move of fragments off a member, off a removed member, or to the members that placement proposes now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ckpt.aggregator.cluster import etcd
from ckpt.aggregator.cluster.fanout import run_in_order
from ckpt.aggregator.file_io.layout_replacement import Replacement, current_record, replace_layout
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.maintenance.all_records import read_file_batches
from ckpt.aggregator.maintenance.repair import FILES_AT_ONCE, repair_namespace, select_fragments
from ckpt.aggregator.maintenance.repair_report import RepairCount, RepairReport
from ckpt.aggregator.maintenance.scrub import require_exists, scrub_namespace
from ckpt.aggregator.placement.rendezvous_hash import choose_members
from ckpt.aggregator.records.file_record import FileLayout, FileRecord, fragment_bytes
from ckpt.aggregator.records.ring_change import RecordsNotMoved, change_ring
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.storage.base.plural import format_count
from ckpt.storage.base.store import ByteProgress

_RECHECK_SECONDS = 1.0
_MAX_TRIES = 5
"""The most tries for a file that changes while its fragments are moved, and the most rounds of `drain_member`."""


def drain_member(namespace: Namespace, member: str, progress: ByteProgress = lambda _: None) -> RepairReport:
    """Move every fragment off a member to other members, in rounds until one finds nothing to move, but at most five.

    New fragments are still written to the member unless its weight is 0.

    progress: called with the number of bytes just written, from many threads. A file that can't be moved is in the report.

    Raises InvalidArgument if there is no such member, or where it is read-only: it could not delete its objects, and its
    records would become outdated.
    """
    if member not in namespace.open_members:
        raise InvalidArgument(
            f"{member} is not a member of {namespace.url}; its members are {', '.join(namespace.open_members)}"
        )
    answers, _ = namespace.fan_out.ask({member: namespace.open_members[member].info}, namespace.commit_timeout_seconds)
    if member in answers and answers[member].state == "read-only":
        raise InvalidArgument(
            f"{member} is read-only, so it can't delete the fragments that move; start it without --read-only and with the "
            "weight 0, or run `ckpt-node admin forget`"
        )
    done = RepairReport()
    for _ in range(_MAX_TRIES):  # a file that gets another name during a round is found by the next one
        moved = _move_off(namespace, member, progress)
        done = replace(done, files=done.files + moved.files, nbytes=done.nbytes + moved.nbytes, failed=moved.failed)
        if moved.failed or not moved.files:
            break
    return done


def _move_off(namespace: Namespace, member: str, progress: ByteProgress) -> RepairReport:
    """Move every fragment of `member` to other members."""

    def members_to_leave(layout: FileLayout, index: int, version: str) -> set[str]:
        return {member}

    return _move_fragments(namespace, members_to_leave, {member}, progress)


def remove_member(
    namespace: Namespace, member: str, is_destroyed: bool = False, progress: ByteProgress = lambda _: None
) -> RepairReport:
    """Remove a member from the namespace permanently: its fragments and the records that it keeps move to other members.

    is_destroyed: whether its device never comes back. Required in a namespace of two members, where the other can't decide
    alone. progress: called with the number of bytes just written, from many threads. Raises InvalidArgument if too few
    members are left. If a record can't move because too few members have it undamaged, the others and their files still
    move; the report names it, and the member still keeps records.
    """
    config = namespace.config
    require_exists(namespace)
    if member not in namespace.ring.all_members and member not in namespace.open_members:
        raise InvalidArgument(
            f"{member} is not a member of {namespace.url}; its members are {', '.join(namespace.open_members)}"
        )
    answers, _ = namespace.fan_out.ask({m: p.info for m, p in namespace.open_members.items()}, namespace.commit_timeout_seconds)
    redundancy = config.redundancy
    remaining = [s for s in namespace.locations if s.name != member and s.name in answers]
    if len(remaining) < redundancy.total_fragments:
        raise InvalidArgument(
            f"without {member}, only {format_count(len(remaining), 'member')} can be reached, and {redundancy} needs "
            f"{redundancy.total_fragments}; start the others, or add a member to the URL, or use less redundancy"
        )
    # From now on no writer uses this member.
    damaged_records = _failures_of(lambda: change_ring(namespace, remaining, member, is_destroyed))
    done, empty_rounds = RepairReport(), 0  # `done` is the report of all rounds
    while member in answers and not is_destroyed and empty_rounds < 2:  # files that were being written may still appear
        moved = _move_off(namespace, member, progress)
        done = replace(done, files=done.files + moved.files, nbytes=done.nbytes + moved.nbytes)
        if moved.failed or damaged_records:
            return replace(done, failed={**moved.failed, **damaged_records})
        empty_rounds = 0 if moved.files else empty_rounds + 1
        if empty_rounds:  # a record that was half-done may be settled a moment later; its writer moves the file too
            time.sleep(_RECHECK_SECONDS)
    if not damaged_records:  # else it still keeps records
        if config.etcd_url:
            etcd.remove_announcement(*etcd.parse_etcd_url(config.etcd_url), member, credentials=config.etcd_credentials)
        namespace.drop_member(member)
    rest = repair_namespace(namespace, scrub_namespace(namespace), progress=progress)
    failed = {**rest.failed, **damaged_records}
    return replace(rest, files=rest.files + done.files, nbytes=rest.nbytes + done.nbytes, failed=failed)


def rebalance_fragments(
    namespace: Namespace, progress: ByteProgress = lambda _: None, on_planned_bytes: ByteProgress = lambda _: None
) -> RepairReport:
    """Move fragments to the members that placement proposes now, such as new members and members that were down.

    The proposal is that of a writer without a host of its own (`near`), so it is the same on every host that calls this.

    New members join the record ring, whose replica sets grow if the redundancy of the namespace tolerates more losses than
    before. progress: called with the number of bytes just written, from many threads. on_planned_bytes: called with the number
    of bytes to be written, before they are.
    """
    require_exists(namespace)
    namespace.update_domains(namespace.commit_timeout_seconds, wait_for_all=True)
    every = {m.name: m for m in (*namespace.ring.members, *(m.location for m in namespace.config.members))}
    locations = namespace.with_known_domains(every.values())
    tolerated_losses = namespace.config.redundancy.tolerated_losses
    damaged_records = _failures_of(lambda: change_ring(namespace, locations, tolerated_losses=tolerated_losses))
    namespace.set_locations(locations)

    def members_to_leave(layout: FileLayout, index: int, version: str) -> set[str]:
        stripe = layout.stripes[index]
        current_members = {layout.objects[f.object_index].member for f in stripe.fragments if f is not None}
        key = f"{version}/{index}"
        return current_members - set(choose_members(key, namespace.locations, len(stripe.fragments)))

    moved = _move_fragments(namespace, members_to_leave, set(), progress, on_planned_bytes)
    return replace(moved, failed={**moved.failed, **damaged_records})


def _failures_of(change: Callable[[], object]) -> dict[str, str]:
    """Change the ring; return the failure to report if damaged records did not move. The files of the others can still move."""
    try:
        change()
    except RecordsNotMoved as error:
        return {"the records": str(error)}
    return {}


def _move_fragments(
    namespace: Namespace,
    members_to_leave: Callable[[FileLayout, int, str], set[str]],
    excluded: set[str],
    progress: ByteProgress,
    on_planned_bytes: ByteProgress = lambda _: None,
) -> RepairReport:
    """Move the fragments of all files off the members that `members_to_leave` returns.

    members_to_leave: called with a layout, the index of a stripe and the version of the file. excluded: members that get no
    fragment. progress: called with the number of bytes just written, from many threads; it may delay them. on_planned_bytes:
    called with the number of bytes to be written.
    """
    count = RepairCount(progress)

    def fragments_to_move(file: FileRecord, layout: FileLayout) -> LostFragments:
        leaving = [members_to_leave(layout, index, file.head.version) for index in range(len(layout.stripes))]
        return LostFragments(
            fragments=select_fragments(layout, lambda index, member_object: member_object.member in leaving[index])
        )

    def planned_bytes(file: FileRecord) -> int:
        if (layout := file.layout) is None:
            return 0
        remaining = fragments_to_move(file, layout).removed_from(layout)
        return sum(fragment_bytes(s.nbytes, layout.redundancy) * s.fragments.count(None) for s in remaining.stripes)

    def move(path: str, file: FileRecord, layout: FileLayout, moving: LostFragments) -> Replacement:
        number = namespace.ring.fence_number
        rebuilt = rebuild_fragments(namespace.member_io, path, file.head.version, layout, moving, count.add_bytes, excluded)
        return replace_layout(namespace, namespace.member_io, path, file, rebuilt, number)

    def move_current(item: tuple[str, FileRecord]) -> None:
        path: str
        file: FileRecord | None
        path, file = item
        for _ in range(_MAX_TRIES):
            if file is None or (layout := file.layout) is None or not (moving := fragments_to_move(file, layout)):
                return
            try:
                if move(path, file, layout, moving) is not Replacement.CHANGED:
                    count.add_file()
                    return
                current = current_record(namespace, path, file)
            except CkptError as error:
                if (current := current_record(namespace, path, file)) is file:
                    count.add_failure(path, str(error))
                    return
            file = current  # it was changed meanwhile, and its old objects may be deleted
        if file is not None and file.layout is not None and fragments_to_move(file, file.layout):
            count.add_failure(
                path, f"it was changed during each of {_MAX_TRIES} tries to move it; move it when nobody writes to it"
            )

    for files, unreadable in read_file_batches(namespace) if namespace.exists() else ():
        for path, reason in unreadable.items():  # its fragments may have to move
            count.add_failure(path, reason)
        on_planned_bytes(sum(map(planned_bytes, files.values())))
        run_in_order(move_current, files.items(), FILES_AT_ONCE, "ckpt-repair")
    return count.report()
