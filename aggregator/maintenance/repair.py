"""Making a namespace whole: what a survey found, the most endangered first.

Lost fragments are made anew from those that are left, records that lag are brought up to date, and objects that no record
names are deleted once they are too old to belong to a write under way. Any of it can be cut off and run again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt.aggregator.cluster.fanout import run_in_order
from ckpt.aggregator.file_io.layout_replacement import current_record, replace_layout
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.rebuild import ByteProgress, rebuild_fragments
from ckpt.aggregator.maintenance.scrub import FileHealth, ScrubReport, scrub_namespace
from ckpt.aggregator.records import record_ring as rings
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.file_record import FileLayout, MemberObject, drop_unused_objects, min_fragments
from ckpt.aggregator.records.record_collection import collect_tombstones
from ckpt.aggregator.records.ring_change import complete_ring_change, ensure_record_redundancy
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.registers.base import ABSENT_NAME, DamagedRecord

log = logging.getLogger("ckpt")

FILES_AT_ONCE = 3


@dataclass(slots=True)
class RepairReport:
    """What was done."""

    files: int = 0
    nbytes: int = 0
    records: int = 0
    orphans: int = 0
    collected: int = 0
    """Records of deleted files that were forgotten."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a path could not be made whole."""


def repair_namespace(
    namespace: Namespace, found: ScrubReport, bytes_per_second: float | None = None, progress: ByteProgress = lambda _: None
) -> RepairReport:
    """Make whole what a survey found, the most endangered first. progress: called with the bytes just written, from
    many threads."""
    done = RepairReport()
    rate_limiter, lock = ByteRateLimiter(bytes_per_second), threading.Lock()
    complete_ring_change(namespace)
    if found.insufficient_redundancy is not None:
        try:
            ensure_record_redundancy(namespace, found.insufficient_redundancy)
        except CkptError as error:
            done.failed["the records"] = str(error)

    def advance(nbytes: int) -> None:
        with lock:
            done.nbytes += nbytes
        progress(nbytes)
        rate_limiter(nbytes)

    def mend(health: FileHealth) -> None:
        if health.state == "lost":
            done.failed[health.path] = "too few fragments are left; start the missing members"
            return
        try:
            rebuilt = _rebuild_file(namespace, health, advance)
        except CkptError as error:
            if current_record(namespace, health.path, health.file) is health.file:
                done.failed[health.path] = str(error)
                log.warning("%s is not made whole: %s", health.path, error)
            else:
                log.info("%s was changed while it was repaired; it is left to the next repair", health.path)
        else:
            present_fragments, asked = min_fragments(rebuilt), rebuilt.redundancy
            if present_fragments < asked.total_fragments:
                done.failed[health.path] = (
                    f"only {present_fragments} of {asked.total_fragments} fragments are there: start or add members"
                )
                return
            with lock:
                done.files += 1

    if found.lagging_paths:
        namespace.settle([f"/{path}" for path in found.lagging_paths])
        done.records = len(found.lagging_paths)
    run_in_order(mend, found.damaged_files, FILES_AT_ONCE, "ckpt-repair")
    if found.orphans or found.lagging_paths:
        done.orphans = _delete_orphans(namespace, found.grace_seconds)
    if not found.missing_members:
        _admit_restored_members(namespace)
        done.collected = collect_tombstones(namespace)
    for open_member in namespace.open_members.values():
        open_member.sweep(found.grace_seconds)
    return done


def _delete_orphans(namespace: Namespace, grace_seconds: float) -> int:
    """Delete the objects that no record names; how many. See `aggregator/records/eras.py` for the order.

    Looked at twice: what was renamed while the records were read once is named then. What old records named that are settled
    now is found here, too.
    """
    first_report = scrub_namespace(namespace, grace_seconds=grace_seconds)
    if not first_report.orphans or begin_era(namespace) is None:
        return 0
    second_report, count = scrub_namespace(namespace, grace_seconds=grace_seconds), 0
    for member, names in first_report.orphans.items():
        confirmed_orphans = sorted(set(names) & set(second_report.orphans.get(member, ())))
        namespace.member_io.discard({member: confirmed_orphans}, wait_for_slow_nodes=True)
        count += len(confirmed_orphans)
    return count


def _admit_restored_members(namespace: Namespace) -> None:
    """Let members vote on what they have no record of, whose registers were lost: the others' records are back on them."""
    registers = {spot.name: namespace.open_members[spot.name].registers for spot in namespace.ring.members}
    answers, _ = namespace.fan_out.ask(
        {m: partial(r.read, [ABSENT_NAME]) for m, r in registers.items()}, namespace.commit_timeout_seconds
    )
    incomplete = [m for m, (answer,) in answers.items() if isinstance(answer, DamagedRecord)]
    if not incomplete:
        return
    report = scrub_namespace(namespace)
    if report.missing_members or report.lagging_paths:
        return
    namespace.invalidate_ring()
    for member in incomplete:
        log.warning("the registers of %s are whole again", member)
        registers[member].learn(namespace.ring.register_name, rings.encode_ring(namespace.ring))
        registers[member].fence(namespace.ring.fence_number)
        registers[member].mark_complete()


def select_fragments(layout: FileLayout, is_selected: Callable[[int, MemberObject], bool]) -> frozenset[tuple[str, int]]:
    """The fragments, as object and position, of those holders that are taken, asked with the number of the piece."""
    return frozenset(
        (holder.name, fragment.position)
        for index, piece in enumerate(layout.stripes)
        for fragment in piece.fragments
        if fragment is not None and is_selected(index, holder := layout.objects[fragment.object_index])
    )


def _rebuild_file(namespace: Namespace, health: FileHealth, advance: ByteProgress) -> FileLayout:
    """What is there of the file now: with fragments missing, where there are too few members."""
    layout = health.file.layout
    assert layout is not None
    damaged_names = {
        name for _, name in health.damaged_objects
    }  # no part of it is trusted any more: all goes elsewhere, and it is put aside
    rotten = select_fragments(layout, lambda _, holder: holder.name in damaged_names)
    lost = replace(health.lost, fragments=health.lost.fragments | rotten)
    number = namespace.ring.fence_number
    rebuilt = rebuild_fragments(
        namespace.member_io, health.path, health.file.head.version, layout, lost, advance, allow_partial=True
    )
    now = lost.removed_from(rebuilt)
    if rebuilt == drop_unused_objects(layout) or not replace_layout(
        namespace, namespace.member_io, health.path, health.file, rebuilt, number, damaged_names
    ):
        return now
    for member, name in health.damaged_objects:
        try:
            if name not in {h.name for h in rebuilt.objects}:
                namespace.open_members[member].quarantine(name)
        except StoreError as error:
            log.info("%s on %s can't be put aside: %s", name, member, error)
    return now


class ByteRateLimiter:
    """Holds a stream of bytes down to a rate, in bytes a second; None: to none."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._began = time.monotonic()
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        if self._rate:
            with self._lock:
                self._done += nbytes
            ahead = self._done / self._rate - (time.monotonic() - self._began)
            if ahead > 0:
                time.sleep(ahead)
