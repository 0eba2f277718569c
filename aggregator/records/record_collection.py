"""Collecting the records of deleted files, so that a listing costs what exists, and not what ever existed.

A deleted file leaves a record that says so (a tombstone). Without it a member that was away would bring the file back. It may
go once no member can: in this order, which `aggregator/records/eras.py` and `storage/registers/fence_numbers.py` prepare.

1. All members that keep records are listed. Where a member still has something older than the tombstone, it gets the tombstone.
2. A new era begins, whose floor is above every ballot of these registers. All members are fenced, so that no call of before
   arrives late.
3. The names are agreed (`aggregator/records/recently_collected.py`), so that a client that finds no record knows that it may
have been collected.
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

from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.leader_election import Election
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.recently_collected import record_collection
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.registers.base import ABSENT_NAME, NO_BALLOT, Ballot, Record, RegisterAnswer

log = logging.getLogger("ckpt")

MIN_AGE_SECONDS = 20.0
"""A tombstone that is younger is left alone: clients that still try to write the file find out what became of it. Nothing that
was agreed depends on it."""

_PAUSE_SECONDS = 10.0
_BATCH = 1_000
_ELECTION_REGISTER = "collector"


def collect_tombstones(records: NamespaceRecords, age_seconds: float | None = None) -> int:
    """Forget the records of files that were deleted at least so long ago; of how many.

    0 where a member that keeps records does not answer, or others do the same. Raises Unavailable.
    """
    if records.ring.previous is not None:
        return 0
    found = _list_tombstones(records, MIN_AGE_SECONDS if age_seconds is None else age_seconds)
    if not found:
        return 0
    above = max((max(r.promised.round, r.accepted.round) for each in found.values() for r in each.values()), default=0)
    number = begin_era(records, above)
    if number is None or records.ring.fence_number != number:
        return 0
    if names := [name for name, each in found.items() if any(r.accepted != NO_BALLOT for r in each.values())]:
        record_collection(records, number, names)
    collected = 0
    for batch in _batches(sorted(found)):
        collected += _forget_registers(records, _confirm_collectable(records, batch, found, number), number)
    log.info("%s: the records of %d deleted files were collected", records.url, collected)
    return collected


def _list_tombstones(records: NamespaceRecords, age_seconds: float) -> dict[str, dict[str, Record]]:
    """What the members that keep a register have in it, by name, of what was deleted, or has never had a value. Nothing where a
    member is missing."""
    listed = _scan_registers(records)
    if lagging := [
        name for name, each in listed.items() if _is_deleted(name, each, age_seconds) and _has_different_values(each)
    ]:
        records.settle(lagging)
        listed = _scan_registers(records)
    return {
        name: {m: r for m, r in each.items() if isinstance(r, Record)}
        for name, each in listed.items()
        if _is_deleted(name, each, age_seconds) and not _has_different_values(each)
    }


def _scan_registers(records: NamespaceRecords) -> dict[str, dict[str, RegisterAnswer]]:
    answers, errors = records.scan("/")
    found: dict[str, dict[str, RegisterAnswer]] = defaultdict(dict)
    for member, given in answers.items() if not errors else ():
        for name, answer in given:
            by_member = found[name]  # what others have left from before does not count, but the name does
            if member in records.ring.replica_set(name).members:
                by_member[member] = answer
    return found


def _is_deleted(name: str, answers: Mapping[str, RegisterAnswer], age_seconds: float) -> bool:
    records = [r for r in answers.values() if isinstance(r, Record)]
    if len(records) < len(answers):
        return False
    newest = max(records, key=lambda r: r.accepted, default=Record()).value
    if newest is None:
        return True
    try:
        head = file_record.decode_record_head(name[1:], newest.head)
    except CkptError:  # of a newer version: whether it was deleted is not known
        return False
    return head.kind == "deleted" and time.time() - head.modified >= age_seconds


def _has_different_values(answers: Mapping[str, RegisterAnswer]) -> bool:
    """Whether members have different values. One that has none may be told nothing: it has nothing to bring back."""
    return len({r.accepted for r in answers.values() if isinstance(r, Record) and r.accepted != NO_BALLOT}) > 1


def _confirm_collectable(
    records: NamespaceRecords, names: Sequence[str], found: Mapping[str, Mapping[str, Record]], fence_number: int
) -> dict[str, list[tuple[str, Ballot]]]:
    """What each member may forget, as all of them say by the new number."""
    ring = records.ring
    registers = {name: records.open_members[name].registers for name in ring.all_members}
    calls = {m: partial(each.read, [ABSENT_NAME, *names], fence_number) for m, each in registers.items()}
    answers, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
    if errors or any(not isinstance(given[0], Record) for given in answers.values()):  # or its registers were lost
        return {}
    by_name = {name: {m: given[i] for m, given in answers.items()} for i, name in enumerate(names, 1)}
    _drop_strays(records, by_name, fence_number)
    collectable: dict[str, list[tuple[str, Ballot]]] = defaultdict(list)
    for name, each in by_name.items():
        (ballot,) = {r.accepted for r in found[name].values() if r.accepted != NO_BALLOT} or {NO_BALLOT}
        replicas = ring.replica_set(name).members
        if all(
            isinstance(r, Record) and r.accepted in (NO_BALLOT, ballot if m in replicas else NO_BALLOT) for m, r in each.items()
        ):
            for member in replicas:
                collectable[member].append((name, each[member].accepted))  # type: ignore[union-attr]
    return collectable


def _drop_strays(records: NamespaceRecords, by_name: dict[str, dict[str, RegisterAnswer]], fence_number: int) -> None:
    """Let members forget registers that they do not keep, as after a change of the ring that did not reach them."""
    ring = records.ring
    strays: dict[str, list[str]] = defaultdict(list)
    for name, each in by_name.items():
        replicas = ring.replica_set(name).members
        for member, answer in each.items():
            if member not in replicas and isinstance(answer, Record) and answer.accepted != NO_BALLOT:
                strays[member].append(name)
    calls = {m: partial(records.open_members[m].registers.drop, names, fence_number) for m, names in strays.items()}
    dropped, _ = records.fan_out.ask(calls, records.commit_timeout_seconds)
    for member in dropped:
        for name in strays[member]:
            by_name[name][member] = Record()


def _forget_registers(
    records: NamespaceRecords, collectable: Mapping[str, Sequence[tuple[str, Ballot]]], fence_number: int
) -> int:
    """Of how many files the tombstone is forgotten. A member that fails here keeps it until the next time."""
    failpoint("collection.forget")
    calls = {m: partial(records.open_members[m].registers.collect, each, fence_number) for m, each in collectable.items()}
    _, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
    for member, error in errors.items():
        log.info("records of deleted files stay on %s: %s", member, error)
    return len({name for each in collectable.values() for name, ballot in each if ballot != NO_BALLOT})


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _BATCH):
        yield names[start : start + _BATCH]


class TombstoneCollector:
    """Collects in the background when a listing has met too many tombstones; one client of a namespace at a time."""

    def __init__(self, records: NamespaceRecords) -> None:
        self._records = records
        self._election = Election(records, secrets.token_hex(8), 6 * _PAUSE_SECONDS, _ELECTION_REGISTER)
        self._lock = threading.Lock()
        self._next_start_at = 0.0

    def start(self) -> None:
        """Begin, unless it was tried just now."""
        with self._lock:
            if time.monotonic() < self._next_start_at:
                return
            self._next_start_at = time.monotonic() + _PAUSE_SECONDS
        threading.Thread(target=self._collect_if_elected, name="ckpt-collector", daemon=True).start()

    def _collect_if_elected(self) -> None:
        try:
            if self._election.try_lead():
                collect_tombstones(self._records)
        except (CkptError, RuntimeError) as error:  # the latter when the process ends
            log.info("the records of deleted files stay in %s for now: %s", self._records.url, error)
