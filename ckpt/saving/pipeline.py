"""The save pipeline: state → leaves → blocks → arena → (codec, digest) → pack → manifest → commit.

One way through for every kind of save. A blocking save is an asynchronous one with a small arena whose caller waits:
staging and writing overlap, and the ring holds the memory down. An asynchronous one stages all of the state first, or
as much as the budget holds, and writes from the arena in the background.

The stages, and what each hands on: `save_plan` (SavePlan) → `staging` (StagedBlock) → `block_writer` (WrittenBlocks) →
`committer` (Checkpoint). `save_run` has the threads.
"""

from __future__ import annotations

from typing import Any

from ckpt.errors import SaveFailed
from ckpt.format.digest import choose_algorithm
from ckpt.repository.writer_lease import Attempt
from ckpt.saving.changing_leaves import changing_leaves_of
from ckpt.saving.committer import Committer
from ckpt.saving.handle import SaveHandle
from ckpt.saving.options import Options
from ckpt.saving.replica_check import compute_digests
from ckpt.saving.save_plan import flatten_state, plan_save
from ckpt.saving.save_run import SaveRun
from ckpt.saving.skipped_step import give_up_attempt
from ckpt.saving.writer_session import Session
from ckpt.state.tree import FlatState
from ckpt.support.runtime import collector_paused


def save(session: Session, state: Any, step: int | None, options: Options, blocking: bool) -> SaveHandle:
    """Save a state (or one that was flattened) as `step`. Returns when committed (`blocking`), else when staged.

    Every call takes its number and its try of the step, also one that fails at once: ranks learn of what went wrong at
    different calls, and would count differently from then on. For that reason a rank of a group that learns here of an
    earlier failure takes part in this save all the same: else the others would fail for it, learn of it one call later, and so
    on.
    """
    if step is None:
        step = session.next_step()
    lease = session.lease
    handle = SaveHandle(step, lambda: lease.progress_count)
    attempt = lease.begin_attempt(step)
    session.note_save_began(step)
    failed: SaveFailed | None = None
    try:
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
    except SaveFailed:
        lease.writer.end_attempt(attempt)  # nothing for the other ranks: the store that would take it does not answer
        raise
    except BaseException as error:
        give_up_attempt(session, attempt, error)
        raise
    if blocking:
        run.run_blocking()
        handle.result()
    else:
        run.run_in_background()
    if failed is not None:
        raise failed
    return handle


def _prepare_run(
    session: Session, handle: SaveHandle, attempt: Attempt, flat: FlatState, options: Options
) -> tuple[SaveRun, Committer]:
    """All that is decided before anything is copied."""
    changing = changing_leaves_of(session.url_and_rank)
    algorithm = choose_algorithm(options.digest, bool(session.repo.keys))
    plan = plan_save(handle.step, algorithm, flat, options.codec, changing.changing, session.group)
    verify = options.verify_replicas if session.group.size > 1 else False
    digests = compute_digests(flat, plan.specs, plan.leaves, verify)
    committer = Committer(session, attempt, handle.step, options, flat, digests)
    return SaveRun(session, handle, attempt, plan, options, committer, changing), committer
