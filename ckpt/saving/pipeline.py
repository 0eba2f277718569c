"""The save pipeline: state → leaves → blocks → arena → (codec, digest) → pack → manifest → commit.

Every kind of save takes the same path. During a blocking save the caller waits, staging and writing overlap, and a small arena
limits the memory. An asynchronous save first stages all blocks but deferred ones, or as many as the memory budget allows, and
then writes from the arena in the background.

The stages and their results: `save_plan` (SavePlan) → `staging` (StagedBlock) → `block_writer` (WrittenBlocks) →
`committer` (Checkpoint). `save_run` has the threads.
"""

from __future__ import annotations

from typing import Any

from ckpt.errors import SaveFailed
from ckpt.format.digest import choose_algorithm
from ckpt.repository.attempt import Attempt
from ckpt.saving.changing_leaves import changing_leaves_of
from ckpt.saving.committer import Committer
from ckpt.saving.handle import SaveHandle
from ckpt.saving.options import Options
from ckpt.saving.replica_check import compute_digests
from ckpt.saving.save_plan import flatten_state, plan_save
from ckpt.saving.save_run import SaveRun
from ckpt.saving.skipped_step import give_up_attempt
from ckpt.saving.writer_session import WriterSession
from ckpt.state.tree import FlatState
from ckpt.support.runtime import collector_paused

BegunSave = tuple[SaveHandle, SaveFailed | None]
"""The handle of a save, and the error of an earlier save, which the caller must raise."""


def save(session: WriterSession, state: Any, step: int | None, options: Options, blocking: bool) -> SaveHandle:
    """Save a state as `step`, and return its handle: after the commit if `blocking`, else when it is staged.

    state: the state, or one that `flatten_state` returned.
    step: its number; None for the next one (`WriterSession.next_step`).
    blocking: whether to wait for the commit. If not, deferred blocks are staged after the return.

    Raises SaveFailed if an earlier save in the background failed, and the errors of `ckpt.save`.
    """
    handle, failed = save_after_failure(session, state, step, options, blocking)
    if failed is not None:
        raise failed
    return handle


def save_after_failure(session: WriterSession, state: Any, step: int | None, options: Options, blocking: bool) -> BegunSave:
    """Do what `save` does, but return the error of an earlier save, and not only raise it.

    Every call uses a step number and an attempt, even if it fails at once. The ranks of a group learn of a failure in different
    calls, and their numbers would differ from then on. For the same reason a rank that finds here that an earlier save failed
    still takes part in this save, and raises afterwards. Otherwise this save would fail on the other ranks, they would find
    that one call later, and so on.

    Raises SaveFailed if an earlier save failed and there is no group, and the errors of `ckpt.save`.
    """
    attempt = session.begin_attempt(step)
    failed: SaveFailed | None = None
    try:  # from here on, an interrupt gives up the attempt, so that no other rank waits for it
        lease = session.group_lease
        handle = SaveHandle(attempt.step, lambda: lease.progress_count)
        session.note_save_began(attempt.step)
        try:
            session.raise_failed()
        except SaveFailed as error:
            if session.group.size == 1:
                raise
            failed = error
        flat = state if isinstance(state, FlatState) else flatten_state(state, session.group)
        with collector_paused():
            run, committer = _prepare_run(session, handle, attempt, flat, options)
        if not options.overwrite:
            committer.refuse_existing()
    except BaseException as error:
        give_up_attempt(session, attempt, error)
        raise
    try:
        session.add_save(handle, options.in_flight)
    except SaveFailed as error:
        give_up_attempt(session, attempt, error, calls_store=False)
        raise
    except BaseException as error:
        run.abandon(error)
        raise
    try:
        if blocking:
            run.run_blocking()
        else:
            run.run_in_background()
    except BaseException as error:
        run.abandon(error)
        raise
    if blocking:
        handle.result()
    return handle, failed


def _prepare_run(
    session: WriterSession, handle: SaveHandle, attempt: Attempt, flat: FlatState, options: Options
) -> tuple[SaveRun, Committer]:
    """Make all decisions that come before the first copy; return the run and the committer of the attempt."""
    changing = changing_leaves_of(session.url_and_rank)
    algorithm = choose_algorithm(options.digest, bool(session.repo.keys))
    plan = plan_save(handle.step, algorithm, flat, options.codec, changing.changing, session.group)
    verify = options.verify_replicas if session.group.size > 1 else False
    digests = compute_digests(flat, plan.specs, plan.leaves, verify, plan.buffers, session.group.rank)
    committer = Committer(session, attempt, handle.step, options, flat, digests)
    return SaveRun(
        session=session,
        handle=handle,
        attempt=attempt,
        plan=plan,
        options=options,
        committer=committer,
        changing=changing,
        buffers=digests.buffers,
    ), committer
