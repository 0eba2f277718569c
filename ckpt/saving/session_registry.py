"""The sessions of this process: one for each repository and group, shared by all who save there, until the last one leaves."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import SaveFailed
from ckpt.groups.base import Group
from ckpt.repository.group_lease import GroupLease
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import SerialCounter, WriterLease
from ckpt.saving import rank_parts
from ckpt.saving.exit_status import fail_cleanup, register_before_thread_shutdown
from ckpt.saving.session_start import RequestedStep, start_alone, start_in_group
from ckpt.saving.writer_session import Session
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

_sessions: dict[tuple[str, Group | None], Session] = {}
_orphaned_sessions: list[Session] = []  # left with an error that nobody has seen
_registry_lock = threading.RLock()
"""Guards these, the number of users of each session, and the release of leases: who finds a lease here can use it."""


def enter(
    repo: Repository,
    group: Group,
    serials: SerialCounter | None = None,
    rendezvous_store: Store | None = None,
    requested_step: RequestedStep = (),
) -> Session:
    """Join this process's session for a repository, or begin one: with a group, every rank must.

    rendezvous_store: a place that can be written to, for a group to meet at; else it is the repository.
    requested_step: the step to save at once.
    """
    key = _session_key(repo, group)
    if group.size > 1:
        with _registry_lock:
            session = _sessions.get(key)
            if session is not None:
                session.require_same_keys(repo)
                session.user_count += 1
                return session
        # Not under the lock: the ranks of a group of threads wait for each other here.
        with _lend_lease(repo, group, serials) as shared:
            start = start_in_group(repo, group, serials, rendezvous_store or repo.store, shared, requested_step)
            new_session = Session(repo, group, start)
            with _registry_lock:
                session = _sessions.setdefault(key, new_session)
                if session is not new_session:
                    new_session.lease.abandon()
                session.user_count += 1
                return session
    with _registry_lock:
        session = _sessions.get(key)
        if session is None:
            for orphan in [o for o in _orphaned_sessions if o.repo.url == repo.url]:
                _orphaned_sessions.remove(orphan)
                orphan.wait()
                orphan.raise_failed()
            # What tiers copy here has their own numbers, which are higher than those of a lease without tiers.
            shared = _lease_of_this_process(repo) if serials is None else None
            session = _sessions[key] = Session(repo, group, start_alone(repo, shared, serials))
        session.require_same_keys(repo)
        session.user_count += 1
        return session


def _lease_of_this_process(repo: Repository) -> GroupLease | None:
    """What it has already where it saves for a group as well: the newest lease, for that has ended the others."""
    leases = [s.lease for s in _sessions.values() if s.repo.url == repo.url and s.lease.rank == 0]
    return max(leases, key=lambda its: its.writer.generation, default=None)


@contextmanager
def _lend_lease(repo: Repository, group: Group, serials: SerialCounter | None) -> Iterator[GroupLease | None]:
    """The lease of this process alone, or for another group, which rank 0 of this one may use as well; it is not released
    meanwhile. None where tiers count with the same numbers.
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


def leave(session: Session, keep: bool = False) -> None:
    """The counterpart of `enter`. keep: the ranks of a group stay together for the next save, until the process ends."""
    with _registry_lock:
        session.user_count -= 1
        if session.user_count or (keep and session.group.size > 1):
            return
        _sessions.pop(_session_key(session.repo, session.group), None)
        if session.has_stuck_save():
            session.lease.abandon()
            rank_parts.note_ended(session.lease, session.group)
            return  # the store would not answer; the next job sees when this process has ended
        if not session.lease.rank and not session.lease.release():
            rank_parts.note_ended(session.lease, session.group)
        if session.has_unseen_error():
            _orphaned_sessions.append(session)
    if session.lease.rank and not session.lease.release():  # nobody shares it, and others need not wait while a store answers
        rank_parts.note_ended(session.lease, session.group)


def _after_fork() -> None:
    """A child has no leases: they name the parent."""
    global _registry_lock
    _sessions.clear()
    _orphaned_sessions.clear()
    _registry_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_THREADS_OF_A_SAVE = ("ckpt-save", "ckpt-stage", "ckpt-write", "ckpt-import", "ckpt-notes")
_THREAD_JOIN_SECONDS = 20.0
"""For a thread of a save that has ended, at most: it has only to return."""


@register_before_thread_shutdown
def _wait_at_exit() -> None:
    """Wait for the saves under way, as long as they make progress: what they need must not end before.

    Their threads must have ended, too: Python ends a daemon thread where it next takes the interpreter's lock, and one that is
    in the code of a C++ library then (an import of pyarrow, a call of torch) takes the process down.
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
    """A save that failed or makes no progress is logged, and ends the program with a status that is not 0."""
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
        # Other sessions may use the lease as well, but nobody saves any more.
        release = session.lease.release if session.lease.rank else session.lease.writer.release
        if session.group.size > 1 and not release():
            rank_parts.note_ended(session.lease, session.group)
    if failed:
        fail_cleanup()
