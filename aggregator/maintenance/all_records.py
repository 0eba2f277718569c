"""Reads the records of all paths from all members, for a scrub."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import PathRecord
from ckpt.aggregator.records.paxos import BATCH_PATHS
from ckpt.aggregator.records.record_ring import RING_PREFIX
from ckpt.aggregator.records.replica_set import ballots_by_name, is_lagging
from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.registers.base import DamagedRecord, RegisterValue

log = logging.getLogger("ckpt")

_LATE_WRITE_SECONDS = (0.2, 0.8)
"""How long to wait before each further look at records that differ. A client returns when a quorum has its change, and the
other members have it a moment later."""


@dataclass(frozen=True, slots=True)
class AllRecords:
    """What the records of all paths say."""

    files: Mapping[str, PathRecord]
    """The record of each path that is a file."""
    named_objects: Set[str]
    """The names of all objects that any record names. Outdated or half-done records of single members count too, because a
    half-done change may still become the newest."""
    is_complete: bool
    """Whether no record of a member is damaged."""
    lagging_paths: Sequence[str]
    """The paths whose record differs between the members of its replica set, or is damaged on one of them."""
    unreadable_paths: Sequence[str]
    """The paths whose record can't be decoded, so that the objects that they need are unknown."""
    missing_members: Mapping[str, StoreError]
    """The members that do not answer, with the error of each."""


def read_all_records(namespace: Namespace) -> AllRecords:
    """Read the records of all paths, of each member and as a quorum has them."""
    answers, errors = namespace.scan("/")
    ballots = ballots_by_name(answers)
    paths = sorted(ballots)
    files: dict[str, PathRecord] = {}
    named: set[str] = set()
    damaged: set[str] = set()
    differing: list[str] = []
    unreadable: list[str] = []
    is_complete = True
    for member in answers:
        for start in range(0, len(paths), BATCH_PATHS):
            batch = [name for name in paths[start : start + BATCH_PATHS] if member in ballots[name]]
            for name, record in zip(batch, namespace.open_members[member].registers.read(batch), strict=True):
                if isinstance(record, DamagedRecord):
                    is_complete = False
                    if member in namespace.ring.replica_set(name).members:
                        damaged.add(name)
                elif record.value is not None:
                    try:
                        layout = file_record.decode_record(name[1:], record.value).layout
                    except CkptError:
                        unreadable.append(name[1:])
                        continue
                    if layout is not None:
                        named.update(o.name for o in layout.objects)
    for start in range(0, len(paths), BATCH_PATHS):
        batch = paths[start : start + BATCH_PATHS]
        values, missing = _read_records(namespace, batch)
        unreadable += [name[1:] for name in missing]
        for name, value in values.items():
            if name not in damaged and is_lagging(namespace.ring.replica_set(name), ballots[name], answers):
                differing.append(name)
            if value is None:
                continue
            try:
                file = file_record.decode_record(name[1:], value)
            except CkptError as error:
                log.error("%s", error)
                unreadable.append(name[1:])
                continue
            if file.layout is not None:
                named.update(o.name for o in file.layout.objects)
            if file.exists and file.head.kind == "file":
                files[name[1:]] = file
    lagging = sorted(name[1:] for name in damaged.union(_still_differing(namespace, differing)))
    return AllRecords(files, named, is_complete, lagging, sorted(set(unreadable)), errors)


def _read_records(namespace: Namespace, names: Sequence[str]) -> tuple[Mapping[str, RegisterValue | None], Sequence[str]]:
    """Return the values of registers, and the names of those that no quorum of undamaged records has.

    One such register makes the read of a whole batch fail, so the others are then read one by one.
    """
    try:
        return namespace.read_records(names), []
    except Unavailable:
        if len(names) == 1:
            log.exception("%s: the record can't be read; the scrub continues with the others", names[0][1:])
            return {}, names
    found: dict[str, RegisterValue | None] = {}
    missing: list[str] = []
    for name in names:
        values, without = _read_records(namespace, [name])
        found.update(values)
        missing += without
    return found, missing


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

    False also where a member that keeps records does not answer. Raises Unavailable where a register can't be settled.
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
