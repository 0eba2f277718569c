"""Collecting the records of deleted files, so that a listing costs what exists, and not what ever existed.

A deleted file leaves a record that says so (a tombstone). Without it a member that was away would bring the file back. It may
go once no member can: in this order, which `aggregator/eras.py` and `storage/fence_numbers.py` prepare.

1. All members that keep records are listed. Where a member still has something older than the tombstone, it gets the tombstone.
2. A new era begins, whose floor is above every ballot of these registers. All members are fenced, so that no call of before
   arrives late.
3. The names are agreed (`aggregator/collected.py`), so that a client that finds no record knows that it may have been
   collected.
4. All members are read by the new number. A tombstone is collected only where each member that keeps its register has it with
   the same ballot, or has no value, and no other member has anything left of it.
5. Each member forgets its registers, if they still have that ballot.

A member that has forgotten a register takes no ballot for it that is not above the floor, and the others still have the
tombstone's ballot. So whatever is agreed from then on has a higher ballot than all that was there before, also if the client
ends between two members. A member that does not answer stops the collection: nothing is forgotten that it may have missed.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from ckpt.aggregator import files
from ckpt.aggregator.collected import note_collection
from ckpt.aggregator.election import Election
from ckpt.aggregator.eras import begin_era
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.errors import CkptError
from ckpt.storage.failpoints import failpoint
from ckpt.storage.registers import ABSENT, NONE, Answer, Ballot, Record

log = logging.getLogger("ckpt")

AGE_SECONDS = 20.0
"""A tombstone that is younger is left alone: clients that still try to write the file find out what became of it. Nothing that
was agreed depends on it."""

_PAUSE_SECONDS = 10.0
_BATCH = 1_000
_OFFICE = "collector"


def collect(namespace: Namespace, age_seconds: float | None = None) -> int:
    """Forget the records of files that were deleted at least so long ago; of how many.

    0 where a member that keeps records does not answer, or others do the same. Raises Unavailable.
    """
    if namespace.ring.before is not None:
        return 0
    found = _tombstones(namespace, AGE_SECONDS if age_seconds is None else age_seconds)
    if not found:
        return 0
    above = max((max(r.promised.round, r.accepted.round) for each in found.values() for r in each.values()), default=0)
    number = begin_era(namespace, above)
    if number is None or namespace.ring.number != number:
        return 0
    if names := [name for name, each in found.items() if any(r.accepted != NONE for r in each.values())]:
        note_collection(namespace, number, names)
    gone = 0
    for batch in _batches(sorted(found)):
        gone += _forget(namespace, _confirmed(namespace, batch, found, number), number)
    log.info("%s: the records of %d deleted files were collected", namespace.url, gone)
    return gone


def _tombstones(namespace: Namespace, age_seconds: float) -> dict[str, dict[str, Record]]:
    """What the members that keep a register have in it, by name, of what was deleted, or has never had a value. Nothing where a
    member is missing."""
    listed = _listed(namespace)
    if behind := [name for name, each in listed.items() if _is_deleted(name, each, age_seconds) and _differs(each)]:
        namespace.settle(behind)
        listed = _listed(namespace)
    return {
        name: {m: r for m, r in each.items() if isinstance(r, Record)}
        for name, each in listed.items()
        if _is_deleted(name, each, age_seconds) and not _differs(each)
    }


def _listed(namespace: Namespace) -> dict[str, dict[str, Answer]]:
    answers, errors = namespace.scan("/")
    found: dict[str, dict[str, Answer]] = defaultdict(dict)
    for member, given in answers.items() if not errors else ():
        for name, answer in given:
            kept = found[name]  # what others have left from before does not count, but the name does
            if member in namespace.ring.keepers(name).members:
                kept[member] = answer
    return found


def _is_deleted(name: str, answers: Mapping[str, Answer], age_seconds: float) -> bool:
    records = [r for r in answers.values() if isinstance(r, Record)]
    if len(records) < len(answers):
        return False
    newest = max(records, key=lambda r: r.accepted, default=Record()).value
    if newest is None:
        return True
    try:
        head = files.decode_head(name[1:], newest.head)
    except CkptError:  # of a newer version: whether it was deleted is not known
        return False
    return head.kind == "deleted" and time.time() - head.modified >= age_seconds


def _differs(answers: Mapping[str, Answer]) -> bool:
    """Whether members have different values. One that has none may be told nothing: it has nothing to bring back."""
    return len({r.accepted for r in answers.values() if isinstance(r, Record) and r.accepted != NONE}) > 1


def _confirmed(
    namespace: Namespace, names: Sequence[str], found: Mapping[str, Mapping[str, Record]], number: int
) -> dict[str, list[tuple[str, Ballot]]]:
    """What each member may forget, as all of them say by the new number."""
    ring = namespace.ring
    registers = {name: namespace.places[name].registers for name in ring.everyone}
    calls = {m: partial(each.read, [ABSENT, *names], number) for m, each in registers.items()}
    answers, errors = namespace.fan_out.ask(calls, namespace.commit_seconds)
    if errors or any(not isinstance(given[0], Record) for given in answers.values()):  # or its registers were lost
        return {}
    by_name = {name: {m: given[i] for m, given in answers.items()} for i, name in enumerate(names, 1)}
    _drop_strays(namespace, by_name, number)
    doomed: dict[str, list[tuple[str, Ballot]]] = defaultdict(list)
    for name, each in by_name.items():
        (ballot,) = {r.accepted for r in found[name].values() if r.accepted != NONE} or {NONE}
        kept = ring.keepers(name).members
        if all(isinstance(r, Record) and r.accepted in (NONE, ballot if m in kept else NONE) for m, r in each.items()):
            for member in kept:
                doomed[member].append((name, each[member].accepted))  # type: ignore[union-attr]
    return doomed


def _drop_strays(namespace: Namespace, by_name: dict[str, dict[str, Answer]], number: int) -> None:
    """Let members forget registers that they do not keep, as after a change of the ring that did not reach them."""
    ring = namespace.ring
    strays: dict[str, list[str]] = defaultdict(list)
    for name, each in by_name.items():
        kept = ring.keepers(name).members
        for member, answer in each.items():
            if member not in kept and isinstance(answer, Record) and answer.accepted != NONE:
                strays[member].append(name)
    calls = {m: partial(namespace.places[m].registers.drop, names, number) for m, names in strays.items()}
    dropped, _ = namespace.fan_out.ask(calls, namespace.commit_seconds)
    for member in dropped:
        for name in strays[member]:
            by_name[name][member] = Record()


def _forget(namespace: Namespace, doomed: Mapping[str, Sequence[tuple[str, Ballot]]], number: int) -> int:
    """Of how many files the tombstone is forgotten. A member that fails here keeps it until the next time."""
    failpoint("collection.forget")
    calls = {m: partial(namespace.places[m].registers.collect, each, number) for m, each in doomed.items()}
    _, errors = namespace.fan_out.ask(calls, namespace.commit_seconds)
    for member, error in errors.items():
        log.info("records of deleted files stay on %s: %s", member, error)
    return len({name for each in doomed.values() for name, ballot in each if ballot != NONE})


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _BATCH):
        yield names[start : start + _BATCH]


class Collector:
    """Collects in the background when a listing has met too many tombstones; one client of a namespace at a time."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._election = Election(namespace, secrets.token_hex(8), 6 * _PAUSE_SECONDS, _OFFICE)
        self._lock = threading.Lock()
        self._not_before = 0.0

    def begin(self) -> None:
        """Begin, unless it was tried just now."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return
            self._not_before = time.monotonic() + _PAUSE_SECONDS
        threading.Thread(target=self._run, name="ckpt-collector", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._election.won():
                collect(self._namespace)
        except (CkptError, RuntimeError) as error:  # the latter when the process ends
            log.info("the records of deleted files stay in %s for now: %s", self._namespace.url, error)
