"""Reads the records of all paths, for a scrub, a drain and a rebalance."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileRecord
from ckpt.aggregator.records.namespace_records import ScannedRecords
from ckpt.aggregator.records.paxos import BATCH_PATHS
from ckpt.aggregator.records.record_ring import RING_PREFIX
from ckpt.aggregator.records.replica_set import ballots_by_name, is_lagging
from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.registers.base import Ballot, DamagedRegister, Register, RegisterAnswer, RegisterValue

log = logging.getLogger("ckpt")

_LATE_WRITE_SECONDS = (0.2, 0.8)
"""How long to wait before each further look at records that differ. A client returns when a quorum has its change, and the
other members have it a moment later."""
_MAX_LISTINGS = 8
"""After this many listings, during each of which a file may have moved, a scrub continues and reports no orphans."""


@dataclass(frozen=True, slots=True)
class AllRecords:
    """The records of all paths, and the objects that they name."""

    files: Mapping[str, FileRecord]
    """The record of each path that is a file."""
    named_objects: Set[str]
    """The names of all objects that any record names. Outdated or half-done records of single members count too, because a
    half-done change may still become the newest."""
    is_complete: bool
    """Whether no record of a member is damaged, and no file was renamed while the records were read, so that each object that a
    file needs is among the named ones."""
    lagging_paths: Sequence[str]
    """The paths whose record differs between the members of its replica set, or is damaged on one of them."""
    unreadable_paths: Mapping[str, str]
    """The reason for each path whose record can't be read or decoded, so that the objects that it needs are unknown."""
    missing_members: Mapping[str, StoreError]
    """The members that do not answer, with the error of each."""


@dataclass(slots=True)
class _MemberRecords:
    """The objects that records of single members name, as far as these were read. Used by one thread."""

    named: set[str] = field(default_factory=set)
    """The names of objects that any record names."""
    damaged: set[str] = field(default_factory=set)
    """The names of registers that are damaged on a member of their replica set."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """By the path of each record that can't be decoded: why."""
    is_complete: bool = True
    """Whether no record was damaged."""
    listed: dict[tuple[str, str], Ballot | None] = field(default_factory=dict)
    """By member and name, the ballot of each register when it was read last; None for one whose head is damaged."""
    missing_members: dict[str, StoreError] = field(default_factory=dict)
    """The members that listed their registers last time, and then did not answer, with the error of each."""

    def read_changed(self, namespace: Namespace, answers: ScannedRecords) -> bool:
        """Read the registers that a listing shows with another ballot, and return whether no object can have been missed.

        During the listing, a rename may move a file to a name that was listed already: then the listing shows a new tombstone.
        After the listing, it may move a file before its record is read: then that has another ballot.
        """
        is_settled = True
        rows: dict[str, list[tuple[str, Ballot | None]]] = {}
        self.missing_members = {}
        for member, scanned in answers.items():
            changed: dict[str, Ballot | None] = {}
            for name, record in scanned:
                ballot = record.accepted_ballot if isinstance(record, Register) else None
                if self.listed.get((member, name), ballot) != ballot or (member, name) not in self.listed:
                    changed[name] = ballot
                    is_settled = is_settled and not _is_tombstone(name, record)
            rows[member] = list(changed.items())
        for start in range(0, max(map(len, rows.values()), default=0), BATCH_PATHS):
            batches = {member: dict(each[start : start + BATCH_PATHS]) for member, each in rows.items()}
            is_settled = self._read(namespace, batches) and is_settled
        return is_settled

    def _read(self, namespace: Namespace, ballots: Mapping[str, Mapping[str, Ballot | None]]) -> bool:
        """Read registers of all members at once, and return whether those that were read still have these ballots."""
        calls = {
            member: partial(namespace.open_members[member].registers.read, [*each])
            for member, each in ballots.items()
            if each and member not in self.missing_members
        }
        answers, errors = namespace.fan_out.ask(calls, namespace.commit_timeout_seconds)
        self.missing_members |= errors
        is_unchanged = True
        for member, records in answers.items():
            is_unchanged = self._add_records(namespace, member, ballots[member], records) and is_unchanged
        return is_unchanged

    def _add_records(
        self, namespace: Namespace, member: str, ballots: Mapping[str, Ballot | None], records: Sequence[RegisterAnswer]
    ) -> bool:
        """Note the objects that registers of a member name, and return whether all of them still have these ballots."""
        found: dict[str, Ballot | None] = {}
        for name, record in zip(ballots, records, strict=True):
            # A listing does not show that a body is damaged.
            found[name] = ballots[name] if isinstance(record, DamagedRegister) else record.accepted_ballot
            if isinstance(record, DamagedRegister):
                self.is_complete = False
                if member in namespace.ring.replica_set(name).members:
                    self.damaged.add(name)
            elif record.value is not None:
                try:
                    self.add_objects(file_record.decode_record(name[1:], record.value))
                except CkptError as error:
                    self.unreadable[name[1:]] = str(error)
        self.listed.update({(member, name): ballot for name, ballot in found.items()})
        return found == ballots

    def add_objects(self, file: FileRecord) -> None:
        """Add the objects of a record to `named`."""
        if file.layout is not None:
            self.named.update(o.name for o in file.layout.objects)


def read_all_records(namespace: Namespace) -> AllRecords:
    """Read the records of all paths, of each member and as a quorum has them."""
    read = _MemberRecords()
    for _ in range(_MAX_LISTINGS):
        answers, errors = namespace.scan("/")
        if is_settled := read.read_changed(namespace, answers):
            break
    if not is_settled:
        log.info(
            "%s: files are renamed or deleted all the time, so objects without a record are left to a later scrub",
            namespace.url,
        )
    ballots = ballots_by_name(answers)
    paths = sorted(ballots)
    files: dict[str, FileRecord] = {}
    differing: list[str] = []
    for start in range(0, len(paths), BATCH_PATHS):
        batch = paths[start : start + BATCH_PATHS]
        values, unreadable = _read_records(namespace, batch)
        read.unreadable |= unreadable
        differing += [
            name
            for name in values
            if name not in read.damaged and is_lagging(namespace.ring.replica_set(name), ballots[name], answers)
        ]
        for path, file in _decode_records(values, read.unreadable).items():
            read.add_objects(file)
            if file.exists and file.head.kind == "file":
                files[path] = file
    lagging = sorted(name[1:] for name in read.damaged.union(_still_differing(namespace, differing)))
    unreadable = dict(sorted(read.unreadable.items()))
    missing_members = {**errors, **read.missing_members}
    return AllRecords(files, read.named, read.is_complete and is_settled, lagging, unreadable, missing_members)


def _is_tombstone(name: str, record: RegisterAnswer) -> bool:
    """Return whether a listed register has the record of a deleted or renamed file, or may have it."""
    if not isinstance(record, Register) or record.value is None:
        return False
    try:
        return file_record.decode_record_head(name[1:], record.value.head).kind == "deleted"
    except CkptError:  # written by a newer version
        return True


def read_file_batches(namespace: Namespace) -> Iterable[tuple[Mapping[str, FileRecord], Mapping[str, str]]]:
    """Yield the records of all files, in batches, with the reason for each path of the batch whose record can't be read.

    Raises Unavailable if so many members are missing that a file could be overlooked.
    """
    answers, _ = namespace.scan("/", wait_for_all=False)
    names = sorted(ballots_by_name(answers))
    for start in range(0, len(names), BATCH_PATHS):
        values, unreadable = _read_records(namespace, names[start : start + BATCH_PATHS])
        decoded = _decode_records(values, unreadable)
        yield {path: file for path, file in decoded.items() if file.exists and file.head.kind == "file"}, unreadable


def _read_records(namespace: Namespace, names: Sequence[str]) -> tuple[Mapping[str, RegisterValue | None], dict[str, str]]:
    """Return the values of registers, and by path the reason for each that no quorum of undamaged records has.

    One such register makes the read of a whole batch fail, so the others are then read one by one.
    """
    try:
        return namespace.read_records(names), {}
    except Unavailable as error:
        if len(names) == 1:
            path = names[0][1:]
            log.error("%s: the record can't be read, and the other files are processed: %s", path, error)
            return {}, {path: str(error)}
    found: dict[str, RegisterValue | None] = {}
    unreadable: dict[str, str] = {}
    for name in names:
        values, reasons = _read_records(namespace, [name])
        found.update(values)
        unreadable |= reasons
    return found, unreadable


def _decode_records(values: Mapping[str, RegisterValue | None], unreadable: dict[str, str]) -> dict[str, FileRecord]:
    """Return the records of registers by path. Add the reason for each that can't be decoded to `unreadable`."""
    decoded: dict[str, FileRecord] = {}
    for name, value in values.items():
        if value is None:
            continue
        try:
            decoded[name[1:]] = file_record.decode_record(name[1:], value)
        except CkptError as error:
            log.error("%s", error)
            unreadable[name[1:]] = str(error)
    return decoded


def _still_differing(namespace: Namespace, names: Sequence[str]) -> Sequence[str]:
    """Return those of the registers that still differ between members after a moment."""
    for seconds in _LATE_WRITE_SECONDS:
        if not names:
            break
        time.sleep(seconds)
        answers, _ = namespace.scan("/")
        ballots = ballots_by_name(answers)
        names = [n for n in names if n in ballots and is_lagging(namespace.ring.replica_set(n), ballots[n], answers)]
    return names


def settle_lagging(namespace: Namespace) -> bool:
    """Settle all registers that differ between members, also those that no path has, and return whether none of them differs.

    False also where a member that keeps records does not answer. Raises Unavailable if a register can't be settled.
    """
    names: Iterable[str] | None = None  # those that differ; another one that a client changes meanwhile does not count
    for seconds in (*_LATE_WRITE_SECONDS, 0.0):
        answers, errors = namespace.scan("")
        if errors:
            return False
        ballots = ballots_by_name(answers)
        names = [
            name
            for name in (ballots if names is None else names)
            if not name.startswith(RING_PREFIX)
            and name in ballots
            and is_lagging(namespace.ring.replica_set(name), ballots[name], answers)
        ]
        if not names:
            return True
        namespace.settle(names)
        time.sleep(seconds)
    return False
