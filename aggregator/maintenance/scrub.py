"""The scrub of a namespace: it finds lost fragments, outdated records, and objects that no record names.

It lists the objects of all members and compares them with the records. On demand it also lets the members read and verify all
fragments.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance.all_records import read_all_records
from ckpt.aggregator.maintenance.inventories import read_inventories
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileLayout, FileRecord, fragment_bytes
from ckpt.storage.base.errors import CkptError, NotFound, StoreError, Unavailable
from ckpt.storage.base.store import ByteProgress
from ckpt.storage.member.damaged_ranges import ChecksummedRange

log = logging.getLogger("ckpt")

GRACE_SECONDS = 3600.0
"""An object that no record names may belong to a file that is still being written, for this time after it was made durable."""

_VERIFY_BYTES = 64 << 20
"""About how many bytes a member verifies in one call."""
_VERIFY_SECONDS = float(1 << 30)
"""Practically no limit for all calls of a scrub: a member reads its whole disk. Each call has a limit of its own."""
_MAX_UNANSWERED_CALLS = 3
"""After this many calls in a row without an answer, a member is asked no more: it may hang, and each call would wait."""

HealthState = Literal["whole", "endangered", "lost"]

ObjectsByMember = dict[str, dict[str, int]]
"""The length of each object in bytes, by member and name."""


@dataclass(frozen=True, slots=True)
class FileHealth:
    """The lost and damaged fragments of a file."""

    path: str
    file: FileRecord
    lost: LostFragments
    spare_fragments: int
    """How many fragments of its worst stripe may still be lost; negative if the stripe can't be read."""
    damaged_objects: tuple[tuple[str, str], ...] = ()
    """The objects with damaged fragments, as member and name."""

    @property
    def state(self) -> HealthState:
        """`lost` if a stripe can't be read, `endangered` if fragments are lost, else `whole`."""
        if self.spare_fragments < 0:
            return "lost"
        return "endangered" if self.lost else "whole"


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub found."""

    files: int = 0
    """The number of all files."""
    nbytes: int = 0
    """The length of all files in bytes."""
    damaged_files: Sequence[FileHealth] = ()
    """The files that are not whole, the most endangered first."""
    orphans: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The names of objects that no record names, by member."""
    lagging_paths: Sequence[str] = ()
    """The paths whose record differs between the members of its replica set."""
    unreadable_paths: Mapping[str, str] = field(default_factory=dict)
    """The reason for each path whose record can't be read, so that the objects that it needs are unknown."""
    missing_members: Mapping[str, StoreError] = field(default_factory=dict)
    """The members that do not answer, with the error of each."""
    unchecked_bytes: int = 0
    """The number of bytes that could not be verified, as their members do not answer or can't read them now."""
    insufficient_redundancy: Redundancy | None = None
    """The highest redundancy of the files whose records tolerate fewer losses than the files; None if there are none."""
    grace_seconds: float = GRACE_SECONDS
    """The age from which objects that no record names count as orphans."""

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to repair."""
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
        """The files that can't be read."""
        return [f for f in self.damaged_files if f.state == "lost"]


def scrub_namespace(
    namespace: Namespace, verify: bool = False, progress: ByteProgress = lambda _: None, grace_seconds: float | None = None,
    on_planned_bytes: ByteProgress = lambda _: None,
) -> ScrubReport:  # fmt: skip
    """Compare the records and the objects of all members that answer, and return the report.

    verify: also let the members read and verify all fragments. progress: called with the number of bytes just verified.
    grace_seconds: the age from which objects that no record names are orphans.
    on_planned_bytes: called with the number of bytes to be verified, before they are.

    Raises NotFound if the namespace does not exist, and Unavailable if so many members are missing that a record could be
    overlooked.
    """
    require_exists(namespace)
    grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
    ages, missing_members = read_inventories(namespace)
    objects: ObjectsByMember = {m: {name: nbytes for name, (nbytes, _) in names.items()} for m, names in ages.items()}
    read = read_all_records(namespace)
    missing_members = {**missing_members, **read.missing_members}
    verified = _verify_objects(namespace, read.files, objects, progress, on_planned_bytes) if verify else _Verification()
    laid_out = {path: file for path, file in read.files.items() if file.layout is not None}
    damaged = _damaged_files(laid_out, objects, verified)
    if damaged:
        # An object may also be missing or short in the lists because it was written after they were read: read them again.
        later, _ = read_inventories(namespace)
        for member, names in later.items():
            objects[member] = objects.get(member, {}) | {name: nbytes for name, (nbytes, _) in names.items()}
        damaged = _damaged_files({health.path: health.file for health in damaged}, objects, verified)
    orphans: dict[str, list[str]] = {}
    if read.is_complete and not missing_members and not read.unreadable_paths:  # else unread records may name them
        for member, names in ages.items():
            found = [name for name, (_, age) in names.items() if name not in read.named_objects and age > grace_seconds]
            if found:
                orphans[member] = found
    return ScrubReport(
        files=len(read.files),
        nbytes=sum(file.head.nbytes for file in read.files.values()),
        damaged_files=sorted(damaged, key=lambda f: (f.spare_fragments, -f.file.head.nbytes)),
        orphans=orphans,
        lagging_paths=read.lagging_paths,
        unreadable_paths=read.unreadable_paths,
        missing_members=missing_members,
        unchecked_bytes=verified.unchecked_bytes,
        insufficient_redundancy=_insufficient_redundancy(namespace, laid_out.values()),
        grace_seconds=grace_seconds,
    )


def require_exists(namespace: Namespace) -> None:
    """Raise NotFound if the namespace does not exist: only a write creates it."""
    if not namespace.exists():
        raise NotFound(f"{namespace.url} is empty: nothing was ever written to it; check that the URL names all its members")


def _insufficient_redundancy(namespace: Namespace, files: Iterable[FileRecord]) -> Redundancy | None:
    """Return the highest redundancy of the files whose records tolerate fewer losses than the files; None if there are none."""
    insufficient = {
        file.layout.redundancy
        for file in files
        if file.layout is not None
        and not namespace.ring.can_tolerate(file.layout.redundancy.tolerated_losses, len(namespace.locations))
    }
    return max(insufficient, key=lambda r: r.tolerated_losses, default=None)


def _damaged_files(files: Mapping[str, FileRecord], objects: ObjectsByMember, verified: _Verification) -> list[FileHealth]:
    """Return the health of those files that have lost fragments."""
    found = [_file_health(path, file, objects, verified.damaged_positions.get(path, {})) for path, file in files.items()]
    return [health for health in found if health.lost]


def _file_health(
    path: str, file: FileRecord, objects: ObjectsByMember, damaged_positions: Mapping[str, Set[int]]
) -> FileHealth:
    """Return the health of a file. damaged_positions: the positions of damaged fragments by object name."""
    layout = file.layout
    assert layout is not None
    missing = {o.name for o in layout.objects if o.name not in objects.get(o.member, {})}
    truncated = _truncated_fragments(layout, objects)
    damaged_fragments = {
        (name, position) for name, positions in damaged_positions.items() for position in positions
    } | truncated
    lost = LostFragments(frozenset(missing), frozenset(damaged_fragments))
    remaining = lost.removed_from(layout)
    spare = file_record.min_fragments(remaining) - layout.redundancy.data_fragments
    damaged_names = {name for name, _ in damaged_fragments}
    damaged = tuple((o.member, o.name) for o in layout.objects if o.name in damaged_names)
    if not any(None in s.fragments for s in remaining.stripes):
        lost = LostFragments()
    elif not lost:  # the layout lacks fragments that were lost earlier and not rebuilt
        lost = LostFragments(is_incomplete=True)
    return FileHealth(path, file, lost, spare, damaged)


def _truncated_fragments(layout: FileLayout, objects: ObjectsByMember) -> set[tuple[str, int]]:
    """Return the fragments beyond the end of their objects, as the name of the object and the position."""
    found = set()
    for stripe in layout.stripes:
        nbytes = fragment_bytes(stripe.nbytes, layout.redundancy)
        for fragment in stripe.fragments:
            if fragment is not None:
                member_object = layout.objects[fragment.object_index]
                end = objects.get(member_object.member, {}).get(member_object.name)
                if end is not None and fragment.position + nbytes > end:
                    found.add((member_object.name, fragment.position))
    return found


@dataclass(frozen=True, slots=True)
class _ObjectCheck:
    """An object of one member whose fragments are to be verified."""

    path: str
    name: str
    ranges: list[ChecksummedRange]
    """The fragments to verify."""

    @property
    def nbytes(self) -> int:
        return _total_bytes(self.ranges)


@dataclass(frozen=True, slots=True)
class _MemberFindings:
    """What the check of one member found."""

    damaged_positions: Mapping[tuple[str, str], Set[int]]
    """The positions of damaged fragments by path and object name."""
    unchecked_bytes: int


@dataclass(frozen=True, slots=True)
class _Verification:
    """What the members found when they verified their fragments."""

    damaged_positions: Mapping[str, Mapping[str, Set[int]]] = field(default_factory=dict)
    """The positions of damaged fragments by path and object name."""
    unchecked_bytes: int = 0


def _verify_objects(
    namespace: Namespace, files: Mapping[str, FileRecord], objects: ObjectsByMember, progress: ByteProgress,
    on_planned_bytes: ByteProgress,
) -> _Verification:  # fmt: skip
    """Let all members verify their fragments at once."""
    unchecked_bytes = 0
    checks: dict[str, list[_ObjectCheck]] = defaultdict(list)
    for path, file in files.items():
        for member, check in _checks_of_file(path, file):
            if member not in objects:
                unchecked_bytes += check.nbytes
            elif check.name in objects[member]:
                checks[member].append(check)
    on_planned_bytes(sum(check.nbytes for each in checks.values() for check in each))
    calls = {member: partial(_verify_member, namespace, member, checks[member], progress) for member in checks}
    answers, errors = namespace.member_io.read_fan_out.ask(calls, _VERIFY_SECONDS)
    for member, error in errors.items():
        log.warning("the objects on %s could not be verified: %s", member, error)
        unchecked_bytes += sum(check.nbytes for check in checks[member])
    damaged_positions: dict[str, dict[str, Set[int]]] = defaultdict(dict)
    for findings in answers.values():
        unchecked_bytes += findings.unchecked_bytes
        for (path, name), positions in findings.damaged_positions.items():
            damaged_positions[path][name] = positions
    return _Verification(damaged_positions, unchecked_bytes)


def _checks_of_file(path: str, file: FileRecord) -> Iterable[tuple[str, _ObjectCheck]]:
    """Yield the check of each object of a file, with the member that has the object."""
    if file.layout is None:
        return
    ranges: dict[int, list[ChecksummedRange]] = defaultdict(list)
    for stripe in file.layout.stripes:
        nbytes = fragment_bytes(stripe.nbytes, file.layout.redundancy)
        for fragment in stripe.fragments:
            if fragment is not None:
                ranges[fragment.object_index].append(ChecksummedRange(fragment.position, nbytes, fragment.cell_checksums))
    for object_index, object_ranges in ranges.items():
        member_object = file.layout.objects[object_index]
        yield member_object.member, _ObjectCheck(path, member_object.name, object_ranges)


def _verify_member(
    namespace: Namespace, member: str, checks: Iterable[_ObjectCheck], progress: ByteProgress
) -> _MemberFindings:
    """Let one member verify its objects, and return what it found."""
    damaged_positions: dict[tuple[str, str], set[int]] = defaultdict(set)
    unchecked_bytes = unanswered_calls = 0
    for check in checks:
        for batch in _split_by_bytes(check.ranges):
            if unanswered_calls >= _MAX_UNANSWERED_CALLS:
                unchecked_bytes += _total_bytes(batch)
                continue
            try:
                damaged = namespace.open_members[member].verify(check.name, batch)
                unanswered_calls = 0
            except StoreError as error:
                unanswered_calls += isinstance(error, Unavailable)
                if isinstance(error, NotFound) and not _may_be_referenced(namespace, check.path, check.name):
                    break  # the file was replaced or moved meanwhile
                log.warning("the object %s on %s could not be verified: %s", check.name, member, error)
                unchecked_bytes += _total_bytes(batch)
                continue
            progress(_total_bytes(batch))
            if damaged:
                damaged_positions[check.path, check.name].update(batch[i].position for i in damaged)
    return _MemberFindings(damaged_positions, unchecked_bytes)


def _total_bytes(ranges: Iterable[ChecksummedRange]) -> int:
    return sum(each.nbytes for each in ranges)


def _may_be_referenced(namespace: Namespace, path: str, name: str) -> bool:
    """Return whether the current record of a path names an object, or can't be read now."""
    try:
        file = namespace.stat(path)
    except CkptError:
        return True
    return file is not None and file.layout is not None and name in [o.name for o in file.layout.objects]


def _split_by_bytes(ranges: Iterable[ChecksummedRange]) -> Iterable[list[ChecksummedRange]]:
    """Yield the ranges, ordered by position, in batches of about `_VERIFY_BYTES`."""
    batch: list[ChecksummedRange] = []
    total = 0
    for each in sorted(ranges, key=lambda each: each.position):
        batch.append(each)
        total += each.nbytes
        if total >= _VERIFY_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
