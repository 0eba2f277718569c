"""Starts a writer session: a process alone or all ranks of a group together get the writer lease."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from ckpt import errors
from ckpt.groups.base import Group
from ckpt.groups.process_identity import ProcessIdentity, this_process
from ckpt.repository.attempt import SerialCounter
from ckpt.repository.file_names import commit_name
from ckpt.repository.group_lease import GroupLease, acquire_group_lease
from ckpt.repository.repository import Repository
from ckpt.repository.retention import sweep
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

RequestedStep = tuple[int | None, ...]
"""The step that the caller asked for in the first save of a session. It contains None if no number was given (the number after
the newest step), and is empty if the first save is unknown."""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What a new session begins with."""

    lease: GroupLease
    next_step: int | None = None
    """The next step number on which a group has agreed, because its ranks see a commit at different times. None without a
    group: `WriterLease.next_step`."""
    rank_0_requested_step: RequestedStep = ()
    """The first step that rank 0 of a group was asked to save."""


@dataclass(frozen=True, slots=True)
class _Announcement:
    """What rank 0 sends to the other ranks of a group: how the session starts, or why it can't."""

    generation: int = 0
    token: str = ""
    lane: int = 0
    """The fields of the lease. lane: the number of the group under it."""
    next_step: int = 0
    requested_step: RequestedStep = ()
    """The fields of `SessionStart`."""
    error: str = ""
    """The name of the class of an error; "" if there is none."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Message:
    """What a rank sends to all others. Only rank 0 sends an announcement."""

    announcement: _Announcement | None
    process: ProcessIdentity


def start_alone(
    repo: Repository, shared: GroupLease | None, serials: SerialCounter | None, prepare: Callable[[], None] | None = None
) -> SessionStart:
    """Return the start of a session without a group. Creates the repository if it does not exist.

    shared: the lease that this process has for a group, which the new session shares.
    prepare: called first.
    """
    if prepare is not None:
        prepare()
    repo.ensure()
    return SessionStart(acquire_group_lease(repo, serials=serials) if shared is None else shared.for_process_alone())


def start_in_group(
    repo: Repository,
    group: Group,
    serials: SerialCounter | None,
    rendezvous_store: Store,
    shared: GroupLease | None,
    requested_step: RequestedStep,
    prepare: Callable[[], None] | None = None,
) -> SessionStart:
    """Return the start of a session of a group. All ranks call it. A save makes no later collective call.

    If rank 0 can't begin, the other ranks raise an error of the same class, or GroupError if the error is not one of ckpt.

    shared: the lease that rank 0 has for another group, which the new session shares. A new lease would fence that group.
    prepare: called first, on rank 0.
    """
    if group.rank:
        announcement, processes = _announce_and_gather(rendezvous_store, group, None)
        if announcement.error:
            kind = getattr(errors, announcement.error, CkptError)
            raise kind(announcement.message)
        writer = WriterLease(repo, announcement.generation, announcement.token, serials)
        own_lease = GroupLease(writer, group.rank, group.size, announcement.lane, processes)
        return SessionStart(own_lease, announcement.next_step, announcement.requested_step)
    lease: GroupLease | None = None
    try:
        if prepare is not None:
            prepare()
        repo.ensure()
        if shared is not None and shared.writer.lease_error() is None:
            lease = shared.for_other_group(group.size)
        else:
            lease = acquire_group_lease(repo, group.size, serials)
            lease.writer.sweep_temporaries_once()  # before any rank of this generation writes
        if shared is None and serials is None:
            numbers = repo.step_numbers()
            newest = repo.newest(numbers=numbers)[1]
            _sweep_uncommitted(lease.writer, [number for number in numbers if number > newest])
            next_step = newest + 1
        else:  # other saves of this process may be running
            next_step = lease.writer.next_step()
        announcement = _Announcement(lease.writer.generation, lease.writer.token, lease.number, next_step, requested_step)
    except BaseException as error:
        if lease is not None:
            lease.release()
        kind, reason = "GroupError", f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, CkptError):
            kind, reason = errors.shared_class_name(error), str(error)
        failure = _Announcement(error=kind, message=f"rank 0 could not begin to save: {reason}")
        _announce_and_gather(rendezvous_store, group, failure)
        raise
    try:
        _, lease.rank_processes = _announce_and_gather(rendezvous_store, group, announcement)
    except BaseException:
        lease.release()
        raise
    return SessionStart(lease, next_step, requested_step)


def _sweep_uncommitted(lease: WriterLease, later_steps: Iterable[int]) -> None:
    """Delete what killed jobs have left of steps that they have not committed, if there is such a step.

    All ranks are about to write, and only rank 0 sweeps, so a rank that finds the store full can't make room. With tiers,
    nothing is deleted here, because a copy to a tier continues with the files that an earlier job has copied.

    later_steps: steps with a folder, above the newest committed step.
    """
    repo = lease.repo
    try:
        if any(not repo.store.exists(commit_name(step)) for step in later_steps):
            with lease.sweep_lock:
                sweep(repo, lease)
    except Exception as error:  # the next sweep tries again
        log.warning("deleting what earlier jobs have left in %s failed: %s", repo.url, error)


def _announce_and_gather(
    rendezvous_store: Store, group: Group, announcement: _Announcement | None
) -> tuple[_Announcement, list[ProcessIdentity]]:
    """Return the announcement of rank 0 and the processes of all ranks, by which a dead rank is recognised later.

    announcement: on rank 0, what to send; None on the other ranks.

    The list is empty if the group can't gather.
    """
    group.meet_at(rendezvous_store)
    if not group.can_gather:
        sent = group.broadcast(None if announcement is None else json.dumps(asdict(announcement)).encode())
        return decode(_Announcement, json.loads(sent)), []
    gathered = group.all_gather(json.dumps(asdict(_Message(announcement, this_process()))).encode())
    messages = [decode(_Message, json.loads(data)) for data in gathered]
    assert messages[0].announcement is not None
    return messages[0].announcement, [message.process for message in messages]
