"""Making a namespace whole: what a survey found, the most endangered first.

Lost fragments are made anew from those that are left, records that lag are brought up to date, and objects that no record
names are deleted once they are too old to belong to a write under way. Any of it can be cut off and run again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt.aggregator import files
from ckpt.aggregator import ring as rings
from ckpt.aggregator.collection import collect
from ckpt.aggregator.eras import begin_era, relinked
from ckpt.aggregator.fanout import in_order
from ckpt.aggregator.files import File, Holder, Layout, compact, fewest
from ckpt.aggregator.namespace import Namespace
from ckpt.aggregator.restoring import restore
from ckpt.aggregator.succession import finish, secure
from ckpt.aggregator.survey import FileHealth, Progress, Survey, survey
from ckpt.storage.errors import CkptError, StoreError
from ckpt.storage.failpoints import failpoint
from ckpt.storage.registers import ABSENT, Damaged, Value

log = logging.getLogger("ckpt")

FILES_AT_ONCE = 3


@dataclass(slots=True)
class Repaired:
    """What was done."""

    files: int = 0
    nbytes: int = 0
    records: int = 0
    orphans: int = 0
    collected: int = 0
    """Records of deleted files that were forgotten."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a path could not be made whole."""


def repair(
    namespace: Namespace, found: Survey, bytes_per_second: float | None = None, progress: Progress = lambda _: None
) -> Repaired:
    """Make whole what a survey found, the most endangered first. progress: called with the bytes just written, from
    many threads."""
    done = Repaired()
    pace, lock = Pace(bytes_per_second), threading.Lock()
    finish(namespace)
    if found.exposed is not None:
        try:
            secure(namespace, found.exposed)
        except CkptError as error:
            done.failed["the records"] = str(error)

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
            made = _restore(namespace, health, advance)
        except CkptError as error:
            if newest(namespace, health.path, health.file) is health.file:
                done.failed[health.path] = str(error)
                log.warning("%s is not made whole: %s", health.path, error)
            else:
                log.info("%s was changed while it was repaired; it is left to the next repair", health.path)
        else:
            there, asked = fewest(made), made.redundancy
            if there < asked.fragments:
                done.failed[health.path] = f"only {there} of {asked.fragments} fragments are there: start or add members"
                return
            with lock:
                done.files += 1

    if found.lagging:
        namespace.settle([f"/{path}" for path in found.lagging])
        done.records = len(found.lagging)
    in_order(mend, found.damaged, FILES_AT_ONCE, "ckpt-repair")
    if found.orphans or found.lagging:
        done.orphans = _delete_orphans(namespace, found.grace_seconds)
    if not found.missing:
        _admit(namespace)
        done.collected = collect(namespace)
    for place in namespace.places.values():
        place.sweep(found.grace_seconds)
    return done


def _delete_orphans(namespace: Namespace, grace_seconds: float) -> int:
    """Delete the objects that no record names; how many. See `aggregator/eras.py` for the order.

    Looked at twice: what was renamed while the records were read once is named then. What old records named that are settled
    now is found here, too.
    """
    again = survey(namespace, grace_seconds=grace_seconds)
    if not again.orphans or begin_era(namespace) is None:
        return 0
    last, count = survey(namespace, grace_seconds=grace_seconds), 0
    for member, names in again.orphans.items():
        doomed = sorted(set(names) & set(last.orphans.get(member, ())))
        namespace.discard({member: doomed}, patient=True)
        count += len(doomed)
    return count


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
        registers[member].fence(namespace.ring.number)
        registers[member].complete()


def newest(namespace: Namespace, path: str, known: File) -> File | None:
    """What a path is now: `known` itself where it still is that, or where nobody can tell."""
    try:
        now = namespace.stat_all([path])[path]
    except CkptError:
        return known
    return known if now is not None and files.encode(now).body == files.encode(known).body else now


def parts(layout: Layout, taken: Callable[[int, Holder], bool]) -> frozenset[tuple[str, int]]:
    """The fragments, as object and position, of those holders that are taken, asked with the number of the piece."""
    return frozenset(
        (holder.name, fragment.position)
        for index, piece in enumerate(layout.pieces)
        for fragment in piece.fragments
        if fragment is not None and taken(index, holder := layout.holders[fragment.holder])
    )


def _restore(namespace: Namespace, health: FileHealth, advance: Progress) -> Layout:
    """What is there of the file now: with fragments missing, where there are too few members."""
    layout = health.file.layout
    assert layout is not None
    bad = {name for _, name in health.rotten}  # no part of it is trusted any more: all goes elsewhere, and it is put aside
    rotten = parts(layout, lambda _, holder: holder.name in bad)
    gone = replace(health.gone, fragments=health.gone.fragments | rotten)
    number = namespace.ring.number
    made = restore(namespace, health.path, health.file.head.version, layout, gone, advance, partly=True)
    now = gone.applied(made)
    if made == compact(layout) or not replace_layout(namespace, health.path, health.file, made, number, bad):
        return now
    for member, name in health.rotten:
        try:
            if name not in {h.name for h in made.holders}:
                namespace.places[member].quarantine(name)
        except StoreError as error:
            log.info("%s on %s can't be put aside: %s", name, member, error)
    return now


def replace_layout(namespace: Namespace, path: str, old: File, layout: Layout, number: int, kept: Collection[str] = ()) -> bool:
    """Say where a file is now, if it still is the same file at the same place. Else the new objects go again. Whether nobody
    needs the old objects any more.

    number: the fence number that was known before the new objects were made. kept: old objects that are not deleted.
    """
    assert old.layout is not None
    before = {h.name for h in old.layout.holders}
    tried = [compact(layout)]  # the last is proposed; the others have the same objects by other names
    same = files.encode(old).body

    def decide(_: str, value: Value | None) -> Value | None:
        return files.encode(replace(old, layout=tried[-1])) if value is not None and value.body == same else None

    def outdated(_: bool, __: int) -> None:
        now, gone = relinked(namespace, tried[-1], {h.name for h in tried[-1].holders} - before)
        if gone:
            raise StoreError(f"{path}: a repair that stood still has lost what it made; the file stays where it is")
        tried.append(now)

    failpoint("repair.record")
    after = namespace.update_by(number, path, decide, outdated)
    there = None if after is None else files.decode(path, after)
    named = {h.name for h in there.layout.holders} if there is not None and there.layout is not None else set()
    new = {h.name for each in tried for h in each.holders}
    done = bool(named & (new - before)) and not old.shared
    if there is not None and there.head.version == old.head.version and not (old.shared or there.shared):
        namespace.discard_layout(old.layout, {*named, *kept, *new})
    if not named & (new - before):
        log.info("%s was changed while it was repaired; it is left to the next repair", path)
    for each in tried:
        namespace.discard_layout(each, named | before)  # what this repair has made, and nobody names
    return done and there is not None and not there.shared and not named & set(kept)


class Pace:
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
