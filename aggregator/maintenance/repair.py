"""The repair of a namespace from the report of a scrub, the most endangered files first.

Lost fragments are rebuilt from those that are left, outdated records are settled, and objects that no record names are deleted
once they are too old to belong to a file that is being written. A repair can be interrupted at any time and run again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ckpt.aggregator.cluster.fanout import run_in_order
from ckpt.aggregator.file_io.layout_replacement import Replacement, current_record, replace_layout
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.rebuild import rebuild_fragments
from ckpt.aggregator.maintenance.all_records import settle_lagging
from ckpt.aggregator.maintenance.repair_report import RepairCount, RepairReport
from ckpt.aggregator.maintenance.scrub import FileHealth, ScrubReport, scrub_namespace
from ckpt.aggregator.records import record_ring
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.file_record import FileLayout, MemberObject, drop_unused_objects, min_fragments
from ckpt.aggregator.records.ring_change import complete_ring_change, ensure_record_redundancy
from ckpt.aggregator.records.tombstone_collection import collect_tombstones
from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.base.store import ByteProgress
from ckpt.storage.registers.base import ABSENT_NAME, DamagedRegister

log = logging.getLogger("ckpt")

FILES_AT_ONCE = 3
"""How many files are repaired or moved in parallel."""


def repair_namespace(
    namespace: Namespace, found: ScrubReport, bytes_per_second: float | None = None, progress: ByteProgress = lambda _: None
) -> RepairReport:
    """Repair what a scrub found, the most endangered files first.

    found: the report of the scrub. bytes_per_second: the most bytes to write per second. progress: called with the number of
    bytes just written, from many threads.

    A file that can't be repaired is in the report. Raises Unavailable and Changed if a ring change that was begun can't be
    completed, and Unavailable if too few members answer.
    """
    rate_limiter = ByteRateLimiter(bytes_per_second)

    def advance(nbytes: int) -> None:
        progress(nbytes)
        rate_limiter(nbytes)

    count = RepairCount(advance)
    for path, unreadable_reason in found.unreadable_paths.items():
        count.add_failure(path, unreadable_reason)
    try:
        complete_ring_change(namespace)
    except CkptError as error:  # such as a record that can't be copied to other members: all files can still be repaired
        count.add_failure("the records", str(error))
    if found.insufficient_redundancy is not None:
        try:
            ensure_record_redundancy(namespace, found.insufficient_redundancy)
        except CkptError as error:
            count.add_failure("the records", str(error))

    def repair(health: FileHealth) -> None:
        if health.state == "lost":
            count.add_failure(health.path, "too few fragments are left; start the missing members")
            return
        try:
            rebuilt = _rebuild_file(namespace, health, count.add_bytes)
        except CkptError as error:
            if current_record(namespace, health.path, health.file) is health.file:
                count.add_failure(health.path, str(error))
                log.warning("%s could not be repaired, and is tried again by the next repair: %s", health.path, error)
                return
            rebuilt = None
        if rebuilt is None:
            log.info("%s was changed while it was repaired; it is left to the next repair", health.path)
        else:
            present_count, redundancy = min_fragments(rebuilt), rebuilt.redundancy
            if present_count < redundancy.total_fragments:
                reason = f"only {present_count} of {redundancy.total_fragments} fragments exist: start or add members"
                count.add_failure(health.path, reason)
            else:
                count.add_file()

    settled = _settle(namespace, found.lagging_paths, count)
    run_in_order(repair, found.damaged_files, FILES_AT_ONCE, "ckpt-repair")
    orphans = _delete_orphans(namespace, found.grace_seconds) if found.orphans or settled else 0
    collected = 0
    if not found.missing_members:
        _admit_restored_members(namespace)
        collected = collect_tombstones(namespace)
    _sweep(namespace, found.grace_seconds)
    return count.report(records=settled, orphans=orphans, collected=collected)


def _settle(namespace: Namespace, paths: Sequence[str], count: RepairCount) -> int:
    """Write the records of these paths to all members that keep them, and return how many were written.

    A record that no quorum of members has undamaged counts as a failure, and the others are still written.
    """
    if not paths:
        return 0
    try:
        namespace.settle([f"/{path}" for path in paths])
    except Unavailable as error:
        if len(paths) > 1:
            return sum(_settle(namespace, [path], count) for path in paths)
        count.add_failure(paths[0], str(error))
        return 0
    return len(paths)


def _delete_orphans(namespace: Namespace, grace_seconds: float) -> int:
    """Delete the objects that no record names, and return their number. `aggregator/records/eras.py` explains the order.

    The first scrub also finds objects that only outdated records named, which are settled now.
    """
    first_report = scrub_namespace(namespace, grace_seconds=grace_seconds)
    if not first_report.orphans or begin_era(namespace) is None:
        return 0
    second_report, count = scrub_namespace(namespace, grace_seconds=grace_seconds), 0
    for member, names in first_report.orphans.items():
        confirmed_orphans = sorted(set(names) & set(second_report.orphans.get(member, ())))
        if member not in namespace.member_io.discard({member: confirmed_orphans}, wait_for_slow_nodes=True):
            count += len(confirmed_orphans)
    return count


def _sweep(namespace: Namespace, grace_seconds: float) -> None:
    """Remove the unfinished objects of killed writers from the directories; a slow one continues in the background."""
    folders = {name: each for name, each in namespace.open_members.items() if each.member.folder is not None}
    calls = {name: partial(each.sweep, grace_seconds) for name, each in folders.items()}
    _, errors = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds, skip_failed=True, mark_late=False)
    for member, error in errors.items():
        log.warning("unfinished objects of killed writers stay on %s: %s", member, error)


def _admit_restored_members(namespace: Namespace) -> None:
    """Let members whose registers were lost vote on missing registers again, once they have all records of the others.

    What they had promised or accepted for a client that still waits is lost. So a new era refuses that client, before the last
    comparison of the records.
    """
    registers = {m.name: namespace.open_members[m.name].registers for m in namespace.ring.members}
    answers, _ = namespace.fan_out.ask(
        {m: partial(r.read, [ABSENT_NAME]) for m, r in registers.items()}, namespace.commit_timeout_seconds
    )
    incomplete = [m for m, (answer,) in answers.items() if isinstance(answer, DamagedRegister)]
    if not incomplete:
        return
    try:
        if not settle_lagging(namespace) or begin_era(namespace) is None or not settle_lagging(namespace):
            return
    except Unavailable as error:
        log.warning("the records of %s are not complete yet: %s", ", ".join(incomplete), error)
        return

    def admit(member: str) -> None:
        registers[member].learn(namespace.ring.register_name, record_ring.encode_ring(namespace.ring))
        registers[member].mark_complete()

    admitted, errors = namespace.fan_out.ask({m: partial(admit, m) for m in incomplete}, namespace.commit_timeout_seconds)
    for member in admitted:
        log.warning("the records of %s are complete again", member)
    for member, failure in errors.items():
        log.warning("the records of %s are not complete yet: %s", member, failure)


def select_fragments(layout: FileLayout, is_selected: Callable[[int, MemberObject], bool]) -> frozenset[tuple[str, int]]:
    """Return fragments as object name and position, selected by the index of their stripe and their member object."""
    return frozenset(
        (member_object.name, fragment.position)
        for index, stripe in enumerate(layout.stripes)
        for fragment in stripe.fragments
        if fragment is not None and is_selected(index, member_object := layout.objects[fragment.object_index])
    )


def _rebuild_file(namespace: Namespace, health: FileHealth, advance: ByteProgress) -> FileLayout | None:
    """Rebuild the lost fragments of a file, and return its layout after that; None if the file was changed meanwhile.

    The layout is incomplete if there are too few members.
    """
    layout = health.file.layout
    assert layout is not None
    # A damaged object is not trusted: all of its fragments are rebuilt elsewhere, and it is quarantined.
    damaged_names = {name for _, name in health.damaged_objects}
    untrusted = select_fragments(layout, lambda _, member_object: member_object.name in damaged_names)
    lost = replace(health.lost, fragments=health.lost.fragments | untrusted)
    number = namespace.ring.fence_number
    rebuilt = rebuild_fragments(
        namespace.member_io, health.path, health.file.head.version, layout, lost, advance, allow_partial=True
    )
    current_layout = lost.removed_from(rebuilt)
    if rebuilt == drop_unused_objects(layout):
        return current_layout
    outcome = replace_layout(namespace, namespace.member_io, health.path, health.file, rebuilt, number, damaged_names)
    if outcome is Replacement.CHANGED:
        return None
    if outcome is Replacement.OLD_NEEDED:
        return current_layout
    needed_names = {o.name for o in rebuilt.objects}
    _quarantine(namespace, [each for each in health.damaged_objects if each[1] not in needed_names])
    return current_layout


def _quarantine(namespace: Namespace, damaged_objects: Iterable[tuple[str, str]]) -> None:
    """Move damaged objects, given as member and name, to the quarantines of their members."""
    names: dict[str, list[str]] = defaultdict(list)
    for member, name in damaged_objects:
        names[member].append(name)

    def quarantine(member: str) -> None:
        for name in names[member]:
            try:
                namespace.open_members[member].quarantine(name)
            except Unavailable:
                raise  # the next calls would not be answered either
            except StoreError as error:
                log.info("the damaged object %s on %s can't be quarantined: %s", name, member, error)

    calls = {member: partial(quarantine, member) for member in names}
    _, errors = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds, skip_failed=True)
    for member, error in errors.items():
        log.info("damaged objects on %s (%s) can't be quarantined: %s", member, ", ".join(names[member]), error)


class ByteRateLimiter:
    """Delays its callers so that they process at most `rate` bytes per second; None means no limit. Safe for many threads."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._began = time.monotonic()
        self._done = 0
        self._lock = threading.Lock()
        """Guards changes of `_done`."""

    def __call__(self, nbytes: int) -> None:
        if self._rate:
            with self._lock:
                self._done += nbytes
            ahead = self._done / self._rate - (time.monotonic() - self._began)
            if ahead > 0:
                time.sleep(ahead)
