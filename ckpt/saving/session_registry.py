"""The registry of writer sessions of this process: one for each repository and group, while it has users."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.errors import SaveFailed
from ckpt.groups.base import Group
from ckpt.repository.attempt import SerialCounter
from ckpt.repository.group_lease import GroupLease
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease
from ckpt.saving import failure_reports
from ckpt.saving.exit_status import fail_cleanup, register_before_thread_shutdown
from ckpt.saving.session_start import RequestedStep, start_alone, start_in_group
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.forks import call_in_forked_child, fork_safe_rlock
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

_sessions: dict[tuple[str, Group | None], WriterSession] = {}
_orphaned_sessions: list[WriterSession] = []
"""Sessions without users that have an error which the user has not seen."""
_registry_lock = fork_safe_rlock()
"""Guards the two registries above, the user count of each session, and the release of leases, so that a lease found here is
not released. The functions that run at the end of the program take no lock: each of them reads a copy of the registries."""


def enter(
    repo: Repository,
    group: Group,
    serials: SerialCounter | None = None,
    rendezvous_store: Store | None = None,
    requested_step: RequestedStep = (),
    prepare: Callable[[], None] | None = None,
) -> WriterSession:
    """Return the session of this process for a repository and group, or begin one. With a group, every rank must call this.

    serials: the counter that the tiers of a repository share; None without tiers.
    rendezvous_store: a writable store at which the group meets; None for the store of the repository.
    requested_step: the step that the caller will save first.
    prepare: called on rank 0 before a new session begins; its error is raised on all ranks.

    Raises RepositoryBusy if a live process writes to the repository, InvalidArgument if the session signs with other keys, and
    SaveFailed if an ended session without a group has an error that the user has not seen.
    """
    key = _session_key(repo, group)
    if group.size > 1:
        with _registry_lock:
            session = _sessions.get(key)
            if session is not None:
                session.require_same_keys(repo)
                session.user_count += 1
                return session
        # Without the lock, because ranks that are threads of this process wait for each other here.
        with _lend_lease(repo, group, serials) as shared:
            start = start_in_group(repo, group, serials, rendezvous_store or repo.store, shared, requested_step, prepare)
            new_session = WriterSession(repo, group, start)
            with _registry_lock:
                session = _sessions.setdefault(key, new_session)
                if session is not new_session:
                    new_session.group_lease.abandon()
                session.user_count += 1
                return session
    with _registry_lock:
        session = _sessions.get(key)
        if session is None:
            for orphan in [o for o in _orphaned_sessions if o.repo.url == repo.url]:
                try:
                    orphan.wait()
                    orphan.raise_failed()
                finally:
                    if not orphan.has_unseen_error():  # otherwise the next save raises the next one
                        _orphaned_sessions.remove(orphan)
            # With tiers, take a new lease: its serials are shared with the tiers and above those of a lease without tiers.
            shared = _lease_of_this_process(repo) if serials is None else None
            session = _sessions[key] = WriterSession(repo, group, start_alone(repo, shared, serials, prepare))
        session.require_same_keys(repo)
        session.user_count += 1
        return session


def _lease_of_this_process(repo: Repository) -> GroupLease | None:
    """Return the newest lease that this process has as rank 0 of any group, or None. The newest one fences the others."""
    leases = [s.group_lease for s in _sessions.values() if s.repo.url == repo.url and s.group_lease.rank == 0]
    return max(leases, key=lambda lease: lease.writer.generation, default=None)


@contextmanager
def _lend_lease(repo: Repository, group: Group, serials: SerialCounter | None) -> Iterator[GroupLease | None]:
    """A context with an existing lease of this process that rank 0 of a new group may use, too; it is not released meanwhile.

    Yields None if there is no such lease, on other ranks, and with tiers, whose serials are shared.
    """
    with _registry_lock:
        lease = _lease_of_this_process(repo)
        if lease is not None and (group.rank or lease.writer.has_shared_serials or serials is not None):
            lease = None
        if lease is not None:
            lease.writer.add_user()
    try:
        yield lease
    finally:
        if lease is not None:
            _drop_user(lease.writer)


def _drop_user(writer: WriterLease) -> None:
    with _registry_lock:
        if writer.drop_user():
            writer.release()


def _session_key(repo: Repository, group: Group) -> tuple[str, Group | None]:
    return repo.url, None if group.size == 1 else group


def leave(session: WriterSession, keep: bool = False) -> None:
    """End the use of a session that `enter` returned. The last user releases the lease.

    keep: the session of a group stays for the next save, until the process ends.
    """
    with _registry_lock:
        session.user_count -= 1
        if session.user_count or (keep and session.group.size > 1):
            return
        _sessions.pop(_session_key(session.repo, session.group), None)
        if session.has_stalled_save():
            session.group_lease.abandon()
            failure_reports.leave_end_note(session.group_lease, session.group)
            return  # the store does not answer; the next job takes over when this process is dead
        if not session.group_lease.rank and not session.group_lease.release():
            failure_reports.leave_end_note(session.group_lease, session.group)
        if session.has_unseen_error():
            _orphaned_sessions.append(session)
    # Only rank 0 shares its lease with other groups, so another rank releases its own without the lock.
    if session.group_lease.rank and not session.group_lease.release():
        failure_reports.leave_end_note(session.group_lease, session.group)


def _after_fork() -> None:
    """In a forked child: forget the sessions, because their leases name the parent process."""
    _sessions.clear()
    _orphaned_sessions.clear()


call_in_forked_child(_after_fork)


_THREADS_OF_A_SAVE = ("ckpt-save", "ckpt-stage", "ckpt-write", "ckpt-import", "ckpt-notes")
_THREAD_JOIN_SECONDS = 20.0
"""How long the exit waits for each thread of a save that has ended. Such a thread only has to return."""


@register_before_thread_shutdown
def _wait_at_exit() -> None:
    """Wait for pending saves while they make progress, before Python shuts down what they need.

    Their threads must end, too. Python ends a daemon thread when it next takes the interpreter lock. If the thread is then in
    the code of a C++ library (an import of pyarrow, a call of torch), the process crashes.
    """
    stuck = False
    for session in [*_sessions.values(), *_orphaned_sessions]:
        try:
            session.wait()
        except SaveFailed:
            stuck = True
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS_OF_A_SAVE):
            thread.join(0.1 if stuck else _THREAD_JOIN_SECONDS)


@atexit.register
def _report_at_exit() -> None:
    """Log saves that failed or make no progress, and then end the program with a status other than 0.

    Releases the leases of groups, so that no other rank waits for this one. A process that saves alone leaves its record: the
    next writer on this host sees that the process is dead.
    """
    failed = False
    for session in [*_sessions.values(), *_orphaned_sessions]:
        try:
            session.wait()
        except SaveFailed as error:
            failed = True
            log.error("%s", error)
            continue
        for handle in session.unreported_failures():
            failed = True
            log.error("saving step %d to %s failed: %s", handle.step, session.repo.url, handle.take_error())
        # Other sessions may share the lease, but none saves any more, so release it at once.
        release = session.group_lease.release if session.group_lease.rank else session.writer_lease.release
        if session.group.size > 1 and not release():
            failure_reports.leave_end_note(session.group_lease, session.group)
    if failed:
        fail_cleanup()
