"""Finding what is missing, rotten or forgotten in a namespace.

A survey lists what members hold and compares it with the records. A scrub also makes members read and check what they hold.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.rebuild import ByteProgress
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import PathRecord, fragment_bytes
from ckpt.storage.base.errors import CkptError, NotFound, StoreError
from ckpt.storage.registers.base import DamagedRecord, Record

log = logging.getLogger("ckpt")

GRACE_SECONDS = 3600.0
"""An object that no record names may belong to a write under way for as long as this, after it was made durable."""

_BATCH = 1_000
_VERIFY_BYTES = 64 << 20

HealthState = Literal["whole", "endangered", "lost"]


@dataclass(frozen=True, slots=True)
class FileHealth:
    """A file of several fragments, some of which may be gone."""

    path: str
    file: PathRecord
    lost: LostFragments
    spare_fragments: int
    """Fragments of its worst piece that may still be lost; negative: it can't be read."""
    damaged_objects: tuple[tuple[str, str], ...] = ()
    """Objects that hold something damaged: member, name."""

    @property
    def state(self) -> HealthState:
        if self.spare_fragments < 0:
            return "lost"
        return "endangered" if self.lost else "whole"


@dataclass(slots=True)
class ScrubReport:
    """What was found."""

    files: int = 0
    nbytes: int = 0
    damaged_files: list[FileHealth] = field(default_factory=list)
    """Files that are not whole, the most endangered first."""
    orphans: dict[str, list[str]] = field(default_factory=dict)
    """Objects that no record names, by member."""
    lagging_paths: list[str] = field(default_factory=list)
    """Paths whose record is not the same on all members that keep it."""
    unreadable_paths: list[str] = field(default_factory=list)
    """Paths whose record can't be read: nobody knows which objects they need."""
    missing_members: dict[str, StoreError] = field(default_factory=dict)
    """Members that do not answer."""
    unchecked_bytes: int = 0
    """Bytes that a scrub could not check, since their members do not answer, or can't read them now."""

    insufficient_redundancy: Redundancy | None = None
    """Of the files whose records outlive fewer members than the files themselves, the most that was asked for."""
    grace_seconds: float = GRACE_SECONDS
    """The age from which objects that no record names count as orphans."""

    @property
    def is_whole(self) -> bool:
        found = (
            self.damaged_files,
            self.orphans,
            self.lagging_paths,
            self.missing_members,
            self.unreadable_paths,
            self.unchecked_bytes,
            self.insufficient_redundancy,
        )
        return not any(found)

    @property
    def lost_files(self) -> list[FileHealth]:
        return [f for f in self.damaged_files if f.state == "lost"]


def scrub_namespace(
    namespace: Namespace, verify: bool = False, progress: ByteProgress = lambda _: None, grace_seconds: float | None = None
) -> ScrubReport:
    """Compare records and objects of all members that answer. verify: let the members read everything, too.

    progress: called with the bytes just checked. grace_seconds: the age from which objects that no record names are orphans.
    """
    require_exists(namespace)
    found = ScrubReport(grace_seconds=GRACE_SECONDS if grace_seconds is None else grace_seconds)
    calls = {name: open_member.inventory for name, open_member in namespace.open_members.items()}
    ages, found.missing_members = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds)
    objects_by_member = {member: {name: nbytes for name, (nbytes, _) in names.items()} for member, names in ages.items()}
    records, named, all_read = _read_records(namespace, found, verify)
    damaged_positions = _verify_objects(namespace, records, objects_by_member, found, progress) if verify else {}
    for path, file in records.items():
        if file.head.kind != "file":
            continue
        found.files += 1
        found.nbytes += file.head.nbytes
        if file.layout is None:
            continue
        redundancy = file.layout.redundancy
        if not namespace.ring.can_tolerate(redundancy.tolerated_losses, len(namespace.locations)):
            found.insufficient_redundancy = max(
                redundancy, found.insufficient_redundancy or redundancy, key=lambda r: r.tolerated_losses
            )
        health = _file_health(path, file, objects_by_member, damaged_positions.get(path, {}))
        if health.lost:
            found.damaged_files.append(health)
    if any(health.lost.objects for health in found.damaged_files):  # or written after the members were asked what they hold
        again, _ = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds)
        later = {
            m: objects_by_member.get(m, {}) | {n: nbytes for n, (nbytes, _) in names.items()} for m, names in again.items()
        }
        checked = [
            _file_health(f.path, f.file, objects_by_member | later, damaged_positions.get(f.path, {}))
            for f in found.damaged_files
        ]
        found.damaged_files = [health for health in checked if health.lost]
    found.damaged_files.sort(key=lambda f: (f.spare_fragments, -f.file.head.nbytes))
    if all_read and not found.missing_members and not found.unreadable_paths:  # else there may be records that name them
        for member, names in ages.items():
            orphans = [name for name, (_, age) in names.items() if name not in named and age > found.grace_seconds]
            if orphans:
                found.orphans[member] = orphans
    return found


def require_exists(namespace: Namespace) -> None:
    """Looking after a namespace does not make one."""
    if not namespace.exists():
        raise NotFound(f"{namespace.url} holds nothing: nobody ever wrote there; is it the right URL, with all its members?")


def _read_records(namespace: Namespace, found: ScrubReport, verify: bool) -> tuple[dict[str, PathRecord], set[str], bool]:
    """The file of each path, and all objects that any record of any member names, be it the newest or not: a change that was
    left half-done may yet become the newest. Notes which records lag. Last: whether all could be read."""
    answers, errors = namespace.scan("/")
    ballots: dict[str, dict[str, object]] = defaultdict(dict)
    for member, given in answers.items():
        for name, record in given:
            ballots[name][member] = record.accepted if isinstance(record, Record) else None
    paths = sorted(ballots)
    records: dict[str, PathRecord] = {}
    named: set[str] = set()
    all_read = True
    for member in answers:
        for start in range(0, len(paths), _BATCH):
            batch = [name for name in paths[start : start + _BATCH] if member in ballots[name]]
            for name, record in zip(batch, namespace.open_members[member].registers.read(batch), strict=True):
                if isinstance(record, DamagedRecord):
                    ballots[name][member] = None
                    all_read = False
                elif record.value is not None:
                    try:
                        layout = file_record.decode_record(name[1:], record.value).layout
                    except CkptError:
                        found.unreadable_paths.append(name[1:])
                        continue
                    if layout is not None:
                        named.update(h.name for h in layout.objects)
    for start in range(0, len(paths), _BATCH):
        batch = paths[start : start + _BATCH]
        for name, value in namespace.read_records(batch).items():
            replicas = [m for m in namespace.ring.replica_set(name).members if m in answers]
            ballots_of_replicas = {ballots[name].get(m) for m in replicas}
            if len(ballots_of_replicas) > 1 or None in ballots_of_replicas:
                found.lagging_paths.append(name[1:])
            if value is None:
                continue
            try:
                file = file_record.decode_record(name[1:], value)
            except CkptError as error:
                log.error("%s", error)
                found.unreadable_paths.append(name[1:])
                continue
            if file.layout is not None:
                named.update(h.name for h in file.layout.objects)
            if file.exists:
                records[name[1:]] = file
    found.missing_members |= errors
    return records, named, all_read


def _file_health(
    path: str, file: PathRecord, objects_by_member: Mapping[str, Mapping[str, int]], damaged_positions: Mapping[str, set[int]]
) -> FileHealth:
    """rotten: positions of damaged fragments by object."""
    layout = file.layout
    assert layout is not None
    missing = {h.name for h in layout.objects if h.name not in objects_by_member.get(h.member, {})}
    lost = LostFragments(
        frozenset(missing), frozenset((name, at) for name, positions in damaged_positions.items() for at in positions)
    )
    remaining = lost.removed_from(layout)
    spare = file_record.min_fragments(remaining) - layout.redundancy.data_fragments
    damaged = tuple((h.member, h.name) for h in layout.objects if h.name in damaged_positions)
    if not any(None in p.fragments for p in remaining.stripes):
        lost = LostFragments()
    elif not lost:  # lost before, and not yet made anew
        lost = LostFragments(is_incomplete=True)
    return FileHealth(path, file, lost, spare, damaged)


def _verify_objects(
    namespace: Namespace,
    records: Mapping[str, PathRecord],
    objects_by_member: Mapping[str, Mapping[str, int]],
    found: ScrubReport,
    progress: ByteProgress,
) -> dict[str, dict[str, set[int]]]:
    """Positions of damaged fragments, by path and object. Each member checks what it holds, all at once."""
    jobs: dict[str, list[tuple[str, str, list[tuple[int, int, bytes]]]]] = defaultdict(list)
    for path, file in records.items():
        if file.layout is None:
            continue
        length = partial(fragment_bytes, redundancy=file.layout.redundancy)
        ranges: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
        for piece in file.layout.stripes:
            for fragment in piece.fragments:
                if fragment is not None:
                    ranges[fragment.object_index].append((fragment.position, length(piece.nbytes), fragment.cell_checksums))
        for number, object_ranges in ranges.items():
            holder = file.layout.objects[number]
            if holder.member not in objects_by_member:
                found.unchecked_bytes += sum(n for _, n, _ in object_ranges)
            elif holder.name in objects_by_member[holder.member]:
                jobs[holder.member].append((path, holder.name, object_ranges))
    damaged_positions: dict[str, dict[str, set[int]]] = defaultdict(dict)

    def check(member: str) -> None:
        for path, name, wanted in jobs[member]:
            for batch in _split_by_bytes(wanted):
                try:
                    damaged = namespace.open_members[member].verify(name, batch)
                except StoreError as error:
                    if isinstance(error, NotFound) and not _is_referenced(namespace, path, name):
                        break  # replaced or moved meanwhile
                    log.warning("%s on %s could not be checked: %s", name, member, error)
                    found.unchecked_bytes += sum(n for _, n, _ in batch)
                    continue
                progress(sum(n for _, n, _ in batch))
                if damaged:
                    damaged_positions[path].setdefault(name, set()).update(batch[i][0] for i in damaged)

    namespace.member_io.read_fan_out.ask({member: partial(check, member) for member in jobs}, float(1 << 30))
    return damaged_positions


def _is_referenced(namespace: Namespace, path: str, name: str) -> bool:
    """Whether a file still needs an object."""
    file = namespace.stat(path)
    return file is not None and file.layout is not None and name in [h.name for h in file.layout.objects]


def _split_by_bytes(ranges: Iterable[tuple[int, int, bytes]]) -> Iterable[list[tuple[int, int, bytes]]]:
    batch: list[tuple[int, int, bytes]] = []
    total = 0
    for each in sorted(ranges):
        batch.append(each)
        total += each[1]
        if total >= _VERIFY_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
