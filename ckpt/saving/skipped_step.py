"""A step that this rank does not save although others may: it lets them know, so that they do not wait."""

from __future__ import annotations

from contextlib import suppress

from ckpt.groups.base import step_mismatch_error
from ckpt.repository.writer_lease import Attempt
from ckpt.saving import rank_parts
from ckpt.saving.writer_session import Session
from ckpt.storage.base.errors import CkptError


def require_same_step_as_rank_0(session: Session, step: int | None) -> None:
    """Raise InvalidArgument where rank 0 has been asked to save another step, or none was named on one of the two.

    That is known of the first save of a group, for which its ranks talk. Of later ones rank 0 only sees that parts are missing.
    """
    for requested in session.take_rank_0_requested_step():
        if requested != step:
            error = step_mismatch_error("save", session.group.rank, session.group.size, step, requested)
            skip_step(session, session.next_step() if requested is None else requested, error)
            raise error


def skip_step(session: Session, step: int, error: BaseException) -> None:
    """This rank does not save a step that the others may save: they need not wait for it."""
    attempt = session.lease.begin_attempt(step)
    session.note_save_began(step)
    give_up_attempt(session, attempt, error)


def give_up_attempt(session: Session, attempt: Attempt, error: BaseException) -> None:
    """End an attempt that has written nothing, and let the other ranks know."""
    session.lease.writer.end_attempt(attempt)
    if session.group.size > 1:
        with suppress(CkptError, OSError):
            rank_parts.publish_failure(session.repo.store, session.lease, session.group, attempt, error)
