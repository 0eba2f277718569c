"""Finding what is missing, rotten or forgotten in a namespace, and making it whole: the most endangered first.

A survey lists what members hold and sets it beside the records. A scrub lets members read and check what they hold, too. A
repair makes lost fragments anew from those that are left, brings records that lag up to date, and deletes objects that no
record names once they are too old to belong to a write under way. Any of it can be cut off and run again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ckpt.aggregator import etcd, files
from ckpt.aggregator import ring as rings
from ckpt.aggregator.fanout import in_order
from ckpt.aggregator.files import File, Holder, Layout, share_bytes
from ckpt.aggregator.namespace import Namespace
from ckpt.aggregator.placement import choose
from ckpt.aggregator.restoring import compact, restore
from ckpt.aggregator.succession import finish, succeed
from ckpt.aggregator.writing import Gone
from ckpt.storage.errors import CkptError, InvalidArgument, NotFound, StoreError
from ckpt.storage.registers import ABSENT, Damaged, Record, Value

log = logging.getLogger("ckpt")

Progress = Callable[[int], None]

GRACE_SECONDS = 3600.0
"""An object that no record names may belong to a write under way for as long as this, after it was made durable."""

_BATCH = 1_000
_VERIFY_BYTES = 64 << 20
_FILES = 3  # made whole at once
_QUIET_SECONDS = 1.0

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
    """Bytes that a scrub could not check, since their members do not answer."""

    @property
    def whole(self) -> bool:
        return not (self.damaged or self.orphans or self.lagging or self.missing or self.unreadable)

    @property
    def lost(self) -> list[FileHealth]:
        return [f for f in self.damaged if f.state == "lost"]


# --- finding ---------------------------------------------------------------------------------------------------


def survey(namespace: Namespace, verify: bool = False, progress: Progress = lambda _: None) -> Survey:
    """Compare records and objects of all members that answer. verify: let the members read everything, too.

    progress: called with the bytes just checked.
    """
    _check(namespace)
    found = Survey()
    calls = {name: place.inventory for name, place in namespace.places.items()}
    ages, found.missing = namespace.fan_out.ask(calls, namespace.commit_seconds)
    held = {member: {name: nbytes for name, (nbytes, _) in names.items()} for member, names in ages.items()}
    records, named = _records(namespace, found, verify)
    rotten = _verify(namespace, records, held, found, progress) if verify else {}
    for path, file in records.items():
        if file.head.kind != "file":
            continue
        found.files += 1
        found.nbytes += file.head.nbytes
        if file.layout is None:
            continue
        health = _health(path, file, held, rotten.get(path, {}))
        if health.gone:
            found.damaged.append(health)
    if any(health.gone.objects for health in found.damaged):  # or written after the members were asked what they hold
        again, _ = namespace.fan_out.ask(calls, namespace.commit_seconds)
        later = {m: held.get(m, {}) | {n: nbytes for n, (nbytes, _) in names.items()} for m, names in again.items()}
        looked = [_health(f.path, f.file, held | later, rotten.get(f.path, {})) for f in found.damaged]
        found.damaged = [health for health in looked if health.gone]
    found.damaged.sort(key=lambda f: (f.spare, -f.file.head.nbytes))
    if not found.missing and not found.unreadable:  # else there may be records that name them
        for member, names in ages.items():
            orphans = [name for name, (_, age) in names.items() if name not in named and age > GRACE_SECONDS]
            if orphans:
                found.orphans[member] = orphans
    return found


def _check(namespace: Namespace) -> None:
    """Looking after a namespace does not make one."""
    if not namespace.exists():
        raise NotFound(f"{namespace.url} holds nothing: nobody ever wrote there; is it the right URL, with all its members?")


def _records(namespace: Namespace, found: Survey, verify: bool) -> tuple[dict[str, File], set[str]]:
    """The file of each path, and all objects that any record of any member names, be it the newest or not: a change that was
    left half-done may yet become the newest. Notes which records lag."""
    answers, errors = namespace.scan("/")
    ballots: dict[str, dict[str, object]] = defaultdict(dict)
    for member, given in answers.items():
        for name, record in given:
            ballots[name][member] = record.accepted if isinstance(record, Record) else None
    paths = sorted(ballots)
    records: dict[str, File] = {}
    named: set[str] = set()
    for member in answers:
        for start in range(0, len(paths), _BATCH):
            batch = [name for name in paths[start : start + _BATCH] if member in ballots[name]]
            for name, record in zip(batch, namespace.places[member].registers.read(batch), strict=True):
                if isinstance(record, Damaged):
                    ballots[name][member] = None
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
    return records, named


def _health(path: str, file: File, held: Mapping[str, Mapping[str, int]], rotten: Mapping[str, set[int]]) -> FileHealth:
    """rotten: positions of damaged fragments by object."""
    layout = file.layout
    assert layout is not None
    absent = {h.name for h in layout.holders if h.name not in held.get(h.member, {})}
    gone = Gone(frozenset(absent), frozenset((name, at) for name, places in rotten.items() for at in places))
    left = gone.applied(layout)
    spare = min((sum(f is not None for f in p.fragments) for p in left.pieces), default=0) - layout.redundancy.data
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
                    log.warning("%s on %s could not be checked: %s", name, member, error)
                    found.unread += sum(n for _, n, _ in batch)
                    continue
                progress(sum(n for _, n, _ in batch))
                if bad:
                    rotten[path].setdefault(name, set()).update(batch[i][0] for i in bad)

    namespace.reads.ask({member: partial(check, member) for member in jobs}, float(1 << 30))
    return rotten


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


# --- making whole ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Repaired:
    """What was done."""

    files: int = 0
    nbytes: int = 0
    records: int = 0
    orphans: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Why a path could not be made whole."""


def repair(
    namespace: Namespace, found: Survey, bytes_per_second: float | None = None, progress: Progress = lambda _: None
) -> Repaired:
    """Make whole what a survey found, the most endangered first. progress: called with the bytes just written."""
    done = Repaired()
    pace, lock = _Pace(bytes_per_second), threading.Lock()
    finish(namespace)

    def advance(nbytes: int) -> None:
        with lock:
            done.nbytes += nbytes
            progress(nbytes)
        pace(nbytes)

    def mend(health: FileHealth) -> None:
        if health.state == "lost":
            done.failed[health.path] = "too few fragments are left; start the missing members"
            return
        try:
            _restore(namespace, health, advance)
        except CkptError as error:
            done.failed[health.path] = str(error)
            log.warning("%s is not made whole: %s", health.path, error)
        else:
            with lock:
                done.files += 1

    if found.lagging:
        namespace.settle([f"/{path}" for path in found.lagging])
        done.records = len(found.lagging)
    in_order(mend, found.damaged, _FILES, "ckpt-repair")
    if found.orphans or found.lagging:
        # Looked at twice: what was renamed while the records were read once is named then. What old records named that are
        # settled now is found here, too.
        again, last = survey(namespace), survey(namespace)
        for member, names in again.orphans.items():
            doomed = sorted(set(names) & set(last.orphans.get(member, ())))
            namespace.discard({member: doomed})
            done.orphans += len(doomed)
    if not found.missing:
        _admit(namespace)
    for place in namespace.places.values():
        place.sweep(GRACE_SECONDS)
    return done


def _admit(namespace: Namespace) -> None:
    """Let members vote on what they have no record of, whose registers were lost: the others' records are back on them."""
    registers = {spot.name: namespace.places[spot.name].registers for spot in namespace.ring.members}
    answers, _ = namespace.fan_out.ask({m: partial(r.read, [ABSENT]) for m, r in registers.items()}, namespace.commit_seconds)
    waiting = [m for m, (answer,) in answers.items() if isinstance(answer, Damaged)]
    if not waiting:
        return
    left = survey(namespace)
    if left.missing or left.lagging:
        return
    namespace.renew()
    for member in waiting:
        log.warning("the registers of %s are whole again", member)
        registers[member].learn(namespace.ring.name, rings.encode(namespace.ring))
        registers[member].fence(namespace.ring.epoch)
        registers[member].complete()


# --- moving ----------------------------------------------------------------------------------------------------


def drain(namespace: Namespace, member: str, progress: Progress = lambda _: None) -> Repaired:
    """Move every fragment off a member, to others. Nothing new goes there only once its weight is 0, or it is read-only."""
    if member not in namespace.places:
        raise InvalidArgument(f"{member} is no member of {namespace.url}; there are {', '.join(namespace.places)}")

    def leaving(layout: Layout, index: int, version: str) -> set[str]:
        return {member}

    return _move(namespace, leaving, {member}, progress)


def forget(namespace: Namespace, member: str, destroyed: bool = False, progress: Progress = lambda _: None) -> Repaired:
    """Take a member out for ever: what it holds goes to others, and so do the records that it keeps.

    destroyed: its device never comes back. Must be said where, of two members, the other alone is left to agree to it.
    """
    config = namespace.config
    _check(namespace)
    if member not in namespace.ring.everyone and member not in namespace.places:
        raise InvalidArgument(f"{member} is no member of {namespace.url}; there are {', '.join(namespace.places)}")
    answers, _ = namespace.fan_out.ask({m: p.info for m, p in namespace.places.items()}, namespace.commit_seconds)
    needed = config.redundancy
    stay = [s for s in namespace.spots if s.name != member and s.name in answers]
    if len(stay) < needed.fragments:
        raise InvalidArgument(
            f"without {member} {len(stay)} members answer and {needed} needs {needed.fragments}; start the others, or another "
            "one and name it in the URL, or write with less redundancy"
        )
    succeed(namespace, stay, member, destroyed)  # from now on whoever writes is told to leave it alone
    done, quiet = Repaired(), 0
    while member in answers and not destroyed and quiet < 2:  # until nothing is left that was under way then
        moved = drain(namespace, member, progress)
        done.files, done.nbytes = done.files + moved.files, done.nbytes + moved.nbytes
        if moved.failed:
            return replace(done, failed=moved.failed)
        quiet = 0 if moved.files else quiet + 1
        if quiet:  # a record that was half-done then may come through a moment later; its writer moves it, too
            time.sleep(_QUIET_SECONDS)
    if config.announced:
        etcd.forget(*etcd.parse_url(config.announced), member)
    namespace.leave_out(member)
    rest = repair(namespace, survey(namespace), progress=progress)
    return replace(rest, files=rest.files + done.files, nbytes=rest.nbytes + done.nbytes)


def rebalance(namespace: Namespace, progress: Progress = lambda _: None) -> Repaired:
    """Move fragments to the members that placement proposes today: to new members, and to those that were away.

    New members keep records from then on, too.
    """
    _check(namespace)
    every = {s.name: s for s in (*(m.spot for m in namespace.config.members), *namespace.ring.members)}
    succeed(namespace, every.values())
    namespace.spots = tuple(every.values())

    def leaving(layout: Layout, index: int, version: str) -> set[str]:
        piece = layout.pieces[index]
        there = {layout.holders[f.holder].member for f in piece.fragments if f is not None}
        key = f"{version}/{index}"
        return there - set(choose(key, namespace.spots, len(piece.fragments), namespace.config.near))

    return _move(namespace, leaving, set(), progress)


def _move(
    namespace: Namespace, leaving: Callable[[Layout, int, str], set[str]], avoid: set[str], progress: Progress
) -> Repaired:
    done, lock = Repaired(), threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            done.nbytes += nbytes
            progress(nbytes)

    def move(item: tuple[str, File | None]) -> None:
        path, file = item
        if file is None or file.layout is None:
            return
        layout = file.layout
        away = [leaving(layout, index, file.head.version) for index in range(len(layout.pieces))]
        gone = Gone(fragments=_parts(layout, lambda index, holder: holder.member in away[index]))
        if not gone:
            return
        try:
            made = restore(namespace, path, file.head.version, layout, gone, advance, avoid)
            replace_layout(namespace, path, file, made)
        except CkptError as error:
            done.failed[path] = str(error)
        else:
            with lock:
                done.files += 1

    paths = [path for path, head in namespace.list().items() if head.kind == "file"]
    for start in range(0, len(paths), _BATCH):
        in_order(move, namespace.stat_all(paths[start : start + _BATCH]).items(), _FILES, "ckpt-repair")
    return done


def _parts(layout: Layout, taken: Callable[[int, Holder], bool]) -> frozenset[tuple[str, int]]:
    """The fragments, as object and position, of those holders that are taken, asked with the number of the piece."""
    return frozenset(
        (holder.name, fragment.position)
        for index, piece in enumerate(layout.pieces)
        for fragment in piece.fragments
        if fragment is not None and taken(index, holder := layout.holders[fragment.holder])
    )


def _restore(namespace: Namespace, health: FileHealth, advance: Progress) -> None:
    layout = health.file.layout
    assert layout is not None
    bad = {name for _, name in health.rotten}  # no part of it is trusted any more: all goes elsewhere, and it is put aside
    parts = _parts(layout, lambda _, holder: holder.name in bad)
    gone = replace(health.gone, fragments=health.gone.fragments | parts)
    made = restore(namespace, health.path, health.file.head.version, layout, gone, advance)
    if not replace_layout(namespace, health.path, health.file, made, bad):
        return
    for member, name in health.rotten:
        try:
            if name not in {h.name for h in made.holders}:
                namespace.places[member].quarantine(name)
        except StoreError as error:
            log.info("%s on %s can't be put aside: %s", name, member, error)


def replace_layout(namespace: Namespace, path: str, old: File, layout: Layout, kept: Collection[str] = ()) -> bool:
    """Say where a file is now, if it still is the same file at the same place. Else the new objects go again. Whether nobody
    needs the old objects any more.

    kept: old objects that are not deleted.
    """
    new = replace(old, layout=compact(layout))
    same = files.encode(old).body

    def decide(_: str, value: Value | None) -> Value | None:
        return files.encode(new) if value is not None and value.body == same else None

    after = namespace.update_record(path, decide)
    assert old.layout is not None
    assert new.layout is not None
    there = None if after is None else files.decode(path, after)
    named = {h.name for h in there.layout.holders} if there is not None and there.layout is not None else set()
    before = {h.name for h in old.layout.holders}
    done = bool(named & ({h.name for h in new.layout.holders} - before)) and not old.shared
    if there is not None and there.head.version == old.head.version and not (old.shared or there.shared):
        namespace.discard_layout(old.layout, {*named, *kept, *(h.name for h in new.layout.holders)})
    if not named & ({h.name for h in new.layout.holders} - before):
        log.info("%s was changed while it was repaired; it is left to the next repair", path)
    namespace.discard_layout(new.layout, named | before)  # what this repair has made, and nobody names
    return done and there is not None and not there.shared and not named & set(kept)


class _Pace:
    """Holds a stream of bytes down to a rate."""

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
