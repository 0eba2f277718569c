"""Finding what is missing, rotten or forgotten in a namespace.

A survey lists what members hold and sets it beside the records. A scrub lets members read and check what they hold, too.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ckpt.aggregator import files
from ckpt.aggregator.files import File, share_bytes
from ckpt.aggregator.namespace import Namespace
from ckpt.aggregator.redundancy import Redundancy
from ckpt.aggregator.writing import Gone
from ckpt.storage.errors import CkptError, NotFound, StoreError
from ckpt.storage.registers import Damaged, Record

log = logging.getLogger("ckpt")

Progress = Callable[[int], None]
"""Called with the bytes just done."""

GRACE_SECONDS = 3600.0
"""An object that no record names may belong to a write under way for as long as this, after it was made durable."""

_BATCH = 1_000
_VERIFY_BYTES = 64 << 20

State = Literal["whole", "endangered", "lost"]


@dataclass(frozen=True, slots=True)
class FileHealth:
    """A file of several fragments, some of which may be gone."""

    path: str
    file: File
    gone: Gone
    spare: int
    """Fragments of its worst piece that may still be lost; negative: it can't be read."""
    rotten: tuple[tuple[str, str], ...] = ()
    """Objects that hold something damaged: member, name."""

    @property
    def state(self) -> State:
        if self.spare < 0:
            return "lost"
        return "endangered" if self.gone else "whole"


@dataclass(slots=True)
class Survey:
    """What was found."""

    files: int = 0
    nbytes: int = 0
    damaged: list[FileHealth] = field(default_factory=list)
    """Files that are not whole, the most endangered first."""
    orphans: dict[str, list[str]] = field(default_factory=dict)
    """Objects that no record names, by member."""
    lagging: list[str] = field(default_factory=list)
    """Paths whose record is not the same on all members that keep it."""
    unreadable: list[str] = field(default_factory=list)
    """Paths whose record can't be read: nobody knows which objects they need."""
    missing: dict[str, StoreError] = field(default_factory=dict)
    """Members that do not answer."""
    unread: int = 0
    """Bytes that a scrub could not check, since their members do not answer, or can't read them now."""

    exposed: Redundancy | None = None
    """Of the files whose records outlive fewer members than the files themselves, the most that was asked for."""
    grace_seconds: float = GRACE_SECONDS
    """The age from which objects that no record names count as orphans."""

    @property
    def whole(self) -> bool:
        found = (self.damaged, self.orphans, self.lagging, self.missing, self.unreadable, self.unread, self.exposed)
        return not any(found)

    @property
    def lost(self) -> list[FileHealth]:
        return [f for f in self.damaged if f.state == "lost"]


def survey(
    namespace: Namespace, verify: bool = False, progress: Progress = lambda _: None, grace_seconds: float | None = None
) -> Survey:
    """Compare records and objects of all members that answer. verify: let the members read everything, too.

    progress: called with the bytes just checked. grace_seconds: the age from which objects that no record names are orphans.
    """
    require_made(namespace)
    found = Survey(grace_seconds=GRACE_SECONDS if grace_seconds is None else grace_seconds)
    calls = {name: place.inventory for name, place in namespace.places.items()}
    ages, found.missing = namespace.fan_out.ask(calls, namespace.commit_seconds)
    held = {member: {name: nbytes for name, (nbytes, _) in names.items()} for member, names in ages.items()}
    records, named, all_read = _records(namespace, found, verify)
    rotten = _verify(namespace, records, held, found, progress) if verify else {}
    for path, file in records.items():
        if file.head.kind != "file":
            continue
        found.files += 1
        found.nbytes += file.head.nbytes
        if file.layout is None:
            continue
        asked = file.layout.redundancy
        if not namespace.ring.bears(asked.tolerated, len(namespace.spots)):
            found.exposed = max(asked, found.exposed or asked, key=lambda r: r.tolerated)
        health = _health(path, file, held, rotten.get(path, {}))
        if health.gone:
            found.damaged.append(health)
    if any(health.gone.objects for health in found.damaged):  # or written after the members were asked what they hold
        again, _ = namespace.fan_out.ask(calls, namespace.commit_seconds)
        later = {m: held.get(m, {}) | {n: nbytes for n, (nbytes, _) in names.items()} for m, names in again.items()}
        looked = [_health(f.path, f.file, held | later, rotten.get(f.path, {})) for f in found.damaged]
        found.damaged = [health for health in looked if health.gone]
    found.damaged.sort(key=lambda f: (f.spare, -f.file.head.nbytes))
    if all_read and not found.missing and not found.unreadable:  # else there may be records that name them
        for member, names in ages.items():
            orphans = [name for name, (_, age) in names.items() if name not in named and age > found.grace_seconds]
            if orphans:
                found.orphans[member] = orphans
    return found


def require_made(namespace: Namespace) -> None:
    """Looking after a namespace does not make one."""
    if not namespace.exists():
        raise NotFound(f"{namespace.url} holds nothing: nobody ever wrote there; is it the right URL, with all its members?")


def _records(namespace: Namespace, found: Survey, verify: bool) -> tuple[dict[str, File], set[str], bool]:
    """The file of each path, and all objects that any record of any member names, be it the newest or not: a change that was
    left half-done may yet become the newest. Notes which records lag. Last: whether all could be read."""
    answers, errors = namespace.scan("/")
    ballots: dict[str, dict[str, object]] = defaultdict(dict)
    for member, given in answers.items():
        for name, record in given:
            ballots[name][member] = record.accepted if isinstance(record, Record) else None
    paths = sorted(ballots)
    records: dict[str, File] = {}
    named: set[str] = set()
    all_read = True
    for member in answers:
        for start in range(0, len(paths), _BATCH):
            batch = [name for name in paths[start : start + _BATCH] if member in ballots[name]]
            for name, record in zip(batch, namespace.places[member].registers.read(batch), strict=True):
                if isinstance(record, Damaged):
                    ballots[name][member] = None
                    all_read = False
                elif record.value is not None:
                    try:
                        layout = files.decode(name[1:], record.value).layout
                    except CkptError:
                        found.unreadable.append(name[1:])
                        continue
                    if layout is not None:
                        named.update(h.name for h in layout.holders)
    for start in range(0, len(paths), _BATCH):
        batch = paths[start : start + _BATCH]
        for name, value in namespace.read_records(batch).items():
            kept = [m for m in namespace.ring.keepers(name).members if m in answers]
            same = {ballots[name].get(m) for m in kept}
            if len(same) > 1 or None in same:
                found.lagging.append(name[1:])
            if value is None:
                continue
            try:
                file = files.decode(name[1:], value)
            except CkptError as error:
                log.error("%s", error)
                found.unreadable.append(name[1:])
                continue
            if file.layout is not None:
                named.update(h.name for h in file.layout.holders)
            if file.exists:
                records[name[1:]] = file
    found.missing |= errors
    return records, named, all_read


def _health(path: str, file: File, held: Mapping[str, Mapping[str, int]], rotten: Mapping[str, set[int]]) -> FileHealth:
    """rotten: positions of damaged fragments by object."""
    layout = file.layout
    assert layout is not None
    absent = {h.name for h in layout.holders if h.name not in held.get(h.member, {})}
    gone = Gone(frozenset(absent), frozenset((name, at) for name, places in rotten.items() for at in places))
    left = gone.applied(layout)
    spare = files.fewest(left) - layout.redundancy.data
    bad = tuple((h.member, h.name) for h in layout.holders if h.name in rotten)
    if not any(None in p.fragments for p in left.pieces):
        gone = Gone()
    elif not gone:  # lost before, and not yet made anew
        gone = Gone(incomplete=True)
    return FileHealth(path, file, gone, spare, bad)


def _verify(
    namespace: Namespace, records: Mapping[str, File], held: Mapping[str, Mapping[str, int]], found: Survey, progress: Progress
) -> dict[str, dict[str, set[int]]]:
    """Positions of damaged fragments, by path and object. Each member checks what it holds, all at once."""
    jobs: dict[str, list[tuple[str, str, list[tuple[int, int, bytes]]]]] = defaultdict(list)
    for path, file in records.items():
        if file.layout is None:
            continue
        length = partial(share_bytes, redundancy=file.layout.redundancy)
        ranges: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
        for piece in file.layout.pieces:
            for fragment in piece.fragments:
                if fragment is not None:
                    ranges[fragment.holder].append((fragment.position, length(piece.nbytes), fragment.cells))
        for number, wanted in ranges.items():
            holder = file.layout.holders[number]
            if holder.member not in held:
                found.unread += sum(n for _, n, _ in wanted)
            elif holder.name in held[holder.member]:
                jobs[holder.member].append((path, holder.name, wanted))
    rotten: dict[str, dict[str, set[int]]] = defaultdict(dict)

    def check(member: str) -> None:
        for path, name, wanted in jobs[member]:
            for batch in _split(wanted):
                try:
                    bad = namespace.places[member].verify(name, batch)
                except StoreError as error:
                    if isinstance(error, NotFound) and not _named(namespace, path, name):
                        break  # replaced or moved meanwhile
                    log.warning("%s on %s could not be checked: %s", name, member, error)
                    found.unread += sum(n for _, n, _ in batch)
                    continue
                progress(sum(n for _, n, _ in batch))
                if bad:
                    rotten[path].setdefault(name, set()).update(batch[i][0] for i in bad)

    namespace.reads.ask({member: partial(check, member) for member in jobs}, float(1 << 30))
    return rotten


def _named(namespace: Namespace, path: str, name: str) -> bool:
    """Whether a file still needs an object."""
    file = namespace.stat(path)
    return file is not None and file.layout is not None and name in [h.name for h in file.layout.holders]


def _split(ranges: Iterable[tuple[int, int, bytes]]) -> Iterable[list[tuple[int, int, bytes]]]:
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
