"""The collection of tombstones: it removes records of deleted files, so that listings stay fast.

A deleted file leaves a record, its tombstone. Without the tombstone, a member that was down during the deletion would bring the
file back. It is removed once no member can do so, in this order (see `aggregator/records/eras.py` and
`storage/registers/fence_numbers.py`):

1. List all members that keep records. A member that has a value older than the tombstone gets the tombstone.
2. Begin a new era, whose floor is above every ballot of these registers. All members are fenced, so that no earlier call
   arrives late.
3. Agree on the names (`aggregator/records/collected_tombstones.py`), so that a client that finds no record knows that it may
   have been collected.
4. Read all members with the new fence number. A tombstone is collected only if each member of its replica set has it with the
   same ballot, or has no value, and no other member has a value of it.
5. Each member forgets its registers, if they still have that ballot.

A member that has forgotten a register accepts only ballots above the floor for it, and the other members still have the ballot
of the tombstone. So everything that is agreed later has a higher ballot than all earlier values, also if the client ends after
some members only. A member that does not answer stops the collection, because it may have missed the tombstone.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.collected_tombstones import record_collection
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.leader_election import Election
from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.aggregator.records.paxos import BATCH_PATHS
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.threads import try_start
from ckpt.storage.registers.base import ABSENT_NAME, NO_BALLOT, Ballot, Register, RegisterAnswer

log = logging.getLogger("ckpt")

MIN_AGE_SECONDS = 20.0
"""The age from which a tombstone is collected. A client that is still writing the file sees from a younger one that the file
was deleted. What was agreed does not depend on this time."""

_PAUSE_SECONDS = 10.0
_ELECTION_REGISTER = "collector"


def collect_tombstones(records: NamespaceRecords, age_seconds: float | None = None) -> int:
    """Forget the records of files that were deleted at least `age_seconds` ago, and return the number of these files.

    Returns 0 if a member that keeps records does not answer, or another client collects at the same time. Raises
    Unavailable.
    """
    if records.ring.previous is not None:
        return 0
    found = _list_tombstones(records, MIN_AGE_SECONDS if age_seconds is None else age_seconds)
    if not found:
        return 0
    above = max(
        (max(r.promised_ballot.round, r.accepted_ballot.round) for each in found.values() for r in each.values()), default=0
    )
    number = begin_era(records, above)
    if number is None or records.ring.fence_number != number:
        return 0
    if names := [name for name, each in found.items() if any(r.accepted_ballot != NO_BALLOT for r in each.values())]:
        record_collection(records, number, names)
    collected = 0
    for batch in _batches(sorted(found)):
        collected += _forget_registers(records, _confirm_collectable(records, batch, found, number), number)
    log.info("%s: collected the records of %d deleted files", records.url, collected)
    return collected


def _list_tombstones(records: NamespaceRecords, age_seconds: float) -> dict[str, dict[str, Register]]:
    """Return the registers to collect: by name, the record of each member of the replica set.

    These are registers with a tombstone of at least this age, and registers without a value. Empty if a member is missing.
    """
    listed = _scan_registers(records)
    if lagging := [
        name for name, each in listed.items() if _is_deleted(name, each, age_seconds) and has_different_values(each)
    ]:
        records.settle(lagging)
        listed = _scan_registers(records)
    return {
        name: {m: r for m, r in each.items() if isinstance(r, Register)}
        for name, each in listed.items()
        if _is_deleted(name, each, age_seconds) and not has_different_values(each)
    }


def _scan_registers(records: NamespaceRecords) -> dict[str, dict[str, RegisterAnswer]]:
    answers, errors = records.scan("/")
    found: dict[str, dict[str, RegisterAnswer]] = defaultdict(dict)
    for member, given in answers.items() if not errors else ():
        for name, answer in given:
            by_member = found[name]  # the name is listed, but values of members outside of the replica set do not count
            if member in records.ring.replica_set(name).members:
                by_member[member] = answer
    return found


def _is_deleted(name: str, answers: Mapping[str, RegisterAnswer], age_seconds: float) -> bool:
    records = [r for r in answers.values() if isinstance(r, Register)]
    if len(records) < len(answers):
        return False
    newest = max(records, key=lambda r: r.accepted_ballot, default=Register()).value
    if newest is None:
        return True
    try:
        head = file_record.decode_record_head(name[1:], newest.head)
    except CkptError:  # written by a newer version: it may be a file
        return False
    return head.kind == "deleted" and time.time() - head.modified >= age_seconds


def has_different_values(answers: Mapping[str, RegisterAnswer]) -> bool:
    """Return whether members have different values. A member without a value does not count: it can bring nothing back."""
    return len({r.accepted_ballot for r in answers.values() if isinstance(r, Register) and r.accepted_ballot != NO_BALLOT}) > 1


def _confirm_collectable(
    records: NamespaceRecords, names: Sequence[str], found: Mapping[str, Mapping[str, Register]], fence_number: int
) -> dict[str, list[tuple[str, Ballot]]]:
    """Return the registers that each member may forget, with their ballots, after all members were read with the new number."""
    ring = records.ring
    registers = {name: records.open_members[name].registers for name in ring.all_members}
    calls = {m: partial(each.read, [ABSENT_NAME, *names], fence_number) for m, each in registers.items()}
    answers, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
    if errors or any(not isinstance(given[0], Register) for given in answers.values()):  # the registers of a member were lost
        return {}
    by_name = {name: {m: given[i] for m, given in answers.items()} for i, name in enumerate(names, 1)}
    _drop_strays(records, by_name, fence_number)
    collectable: dict[str, list[tuple[str, Ballot]]] = defaultdict(list)
    for name, each in by_name.items():
        (ballot,) = {r.accepted_ballot for r in found[name].values() if r.accepted_ballot != NO_BALLOT} or {NO_BALLOT}
        replicas = ring.replica_set(name).members
        if is_collectable(each, ballot, replicas):
            for member in replicas:
                collectable[member].append((name, each[member].accepted_ballot))  # type: ignore[union-attr]
    return collectable


def is_collectable(answers: Mapping[str, RegisterAnswer], ballot: Ballot, replicas: Collection[str]) -> bool:
    """Return whether members may forget a register whose tombstone has this ballot.

    answers: of all members after the era began. Each member of the replica set must have the tombstone or no value. No other
    member may have a value.
    """
    return all(
        isinstance(r, Register) and r.accepted_ballot in (NO_BALLOT, ballot if m in replicas else NO_BALLOT)
        for m, r in answers.items()
    )


def _drop_strays(records: NamespaceRecords, by_name: dict[str, dict[str, RegisterAnswer]], fence_number: int) -> None:
    """Let members forget registers outside of their replica sets. A ring change that did not reach a member leaves some."""
    ring = records.ring
    strays: dict[str, list[str]] = defaultdict(list)
    for name, each in by_name.items():
        replicas = ring.replica_set(name).members
        for member, answer in each.items():
            if member not in replicas and isinstance(answer, Register) and answer.accepted_ballot != NO_BALLOT:
                strays[member].append(name)
    calls = {m: partial(records.open_members[m].registers.drop, names, fence_number) for m, names in strays.items()}
    dropped, _ = records.fan_out.ask(calls, records.commit_timeout_seconds)
    for member in dropped:
        for name in strays[member]:
            by_name[name][member] = Register()


def _forget_registers(
    records: NamespaceRecords, collectable: Mapping[str, Sequence[tuple[str, Ballot]]], fence_number: int
) -> int:
    """Let members forget these registers, and return the number of tombstones. A member that fails keeps them until later."""
    failpoint("collection.forget")
    calls = {m: partial(records.open_members[m].registers.collect, each, fence_number) for m, each in collectable.items()}
    _, errors = records.fan_out.ask(calls, records.commit_timeout_seconds)
    for member, error in errors.items():
        log.info("records of deleted files stay on %s until the next collection: %s", member, error)
    return len({name for each in collectable.values() for name, ballot in each if ballot != NO_BALLOT})


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), BATCH_PATHS):
        yield names[start : start + BATCH_PATHS]


class TombstoneCollector:
    """Collects tombstones in the background after a listing has found too many; only one client of a namespace does so."""

    def __init__(self, records: NamespaceRecords) -> None:
        self._records = records
        self._election = Election(records, secrets.token_hex(8), 6 * _PAUSE_SECONDS, _ELECTION_REGISTER)
        self._lock = threading.Lock()
        """Guards `_next_start_at`."""
        self._next_start_at = 0.0

    def start(self) -> None:
        """Start a collection, unless one was started within the last 10 seconds."""
        with self._lock:
            if time.monotonic() < self._next_start_at:
                return
            self._next_start_at = time.monotonic() + _PAUSE_SECONDS
        try_start(threading.Thread(target=self._collect_if_elected, name="ckpt-collector", daemon=True))

    def _collect_if_elected(self) -> None:
        try:
            if self._election.try_lead():
                with self._election.renewed_term():
                    collect_tombstones(self._records)
        except (CkptError, RuntimeError) as error:  # RuntimeError: the process is ending
            log.info("%s: the records of deleted files stay until the next collection: %s", self._records.url, error)
