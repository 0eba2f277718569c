"""Ends the part of a rank in a step that it does not save, so that the other ranks do not wait for it."""

from __future__ import annotations

from contextlib import suppress

from ckpt.groups.base import step_mismatch_error
from ckpt.repository.attempt import Attempt
from ckpt.saving import failure_reports
from ckpt.saving.writer_session import WriterSession
from ckpt.storage.base.errors import CkptError


def require_same_step_as_rank_0(session: WriterSession, step: int | None) -> None:
    """Raise InvalidArgument if this rank and rank 0 were asked to save different steps, or only one was given a number.

    The ranks compare this only for the first save of a group, in the collective calls of its session. In a later save, rank 0
    only finds that parts of other ranks are missing.

    step: what this rank was asked to save; None if no number was given.
    """
    for requested in session.take_rank_0_requested_step():
        if requested != step:
            error = step_mismatch_error("save", session.group.rank, session.group.size, step, requested)
            skip_step(session, session.next_step() if requested is None else requested, error)
            raise error


def skip_step(session: WriterSession, step: int, error: BaseException, calls_store: bool = True) -> None:
    """Publish that this rank does not save a step, so that the other ranks do not wait for it.

    error: the reason.
    calls_store: as for `give_up_attempt`.
    """
    attempt = session.group_lease.begin_attempt(step)
    try:
        session.note_save_began(step)
    finally:
        give_up_attempt(session, attempt, error, calls_store)


def give_up_attempt(session: WriterSession, attempt: Attempt, error: BaseException, calls_store: bool = True) -> None:
    """End an attempt that will not commit, and publish its error for the other ranks; no error of the store is raised.

    calls_store: whether to write the error to the store, too; False if the store does not answer, so that only the group gets
        it.
    """
    session.writer_lease.end_attempt(attempt)
    if session.group.size == 1:
        return
    report = failure_reports.publish_failure if calls_store else failure_reports.leave_failure_note
    with suppress(CkptError, OSError):
        report(session.repo.store, session.group_lease, session.group, attempt, error)
