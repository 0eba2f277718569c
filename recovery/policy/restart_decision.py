"""The decision after an attempt has failed: restart or halt, from which step, and after which wait. Pure.

`policy/hosts_of_next_attempt.py` decides on which hosts. The coordinator of a run and the simulator call the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from ckpt.recovery.policy.failure import PLANNED_CAUSES, SOON_STEPS, Failure, describe_failure
from ckpt.recovery.policy.loss_rollback import roll_back
from ckpt.training.batch_order import Ranges


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of restarts that are left. After a failed attempt that made progress, `max_restarts` are possible again."""

    max_restarts: int = 10
    restarts_left: int = 10
    """The restart that follows the last failure is counted already. -1: there is none for it."""
    failures_without_progress: int = 0
    """Consecutive attempts that failed without a newer committed step."""
    best_step: int = -1
    """The newest step that was ever committed. After the program has rolled back by itself: the newest of the new line."""
    line: int = 0
    """The newest training line of a committed step."""
    restored: int = -1
    """The step that the last attempt resumed from; -1 none."""

    def after(self, failure: Failure, was_rolled_back: bool = False) -> Budget:
        """Return the budget after one more failed attempt.

        Steps that a program saves after a roll-back of its own are newer than those it left behind, so they are progress. A
        roll-back counts once per restored step: a program that returns to the same step at each start makes no progress.

        failure: how the attempt ended.
        was_rolled_back: whether `ckpt-run` made the attempt restore an older step than the newest.
        """
        if failure.cause in PLANNED_CAUSES:
            return self
        program_rolled_back = failure.line > self.line and failure.restored != self.restored and not was_rolled_back
        now = replace(self, line=max(self.line, failure.line), restored=failure.restored)
        if program_rolled_back or failure.committed > self.best_step or _has_run_long(failure):
            best = failure.committed if program_rolled_back else max(self.best_step, failure.committed)
            return replace(now, restarts_left=self.max_restarts - 1, failures_without_progress=0, best_step=best)
        return replace(now, restarts_left=self.restarts_left - 1, failures_without_progress=self.failures_without_progress + 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action, and why."""

    action: Literal["restart", "halt"]
    reason: str
    wait_seconds: float = 0.0
    restore_step_limit: int | None = None
    """Restore a step before this one, because this step and later ones may be bad."""
    skip: Ranges | None = None
    """Batches to skip from now on; None: the same batches as before."""
    loss_limit: float | None = None
    """The loss above which a rank reports a bad loss, until it has seen enough losses to judge by itself."""
    budget: Budget = Budget()


LONG_RUN_SECONDS = 600.0
"""Ranks without a `Checkpointer`, which report no steps, count as having made progress if they ran for this long."""


def _has_run_long(failure: Failure) -> bool:
    is_without_reports = failure.step < 0 and not failure.uses_ckpt and failure.cause != "damaged"
    return is_without_reports and failure.ran_seconds >= LONG_RUN_SECONDS


MAX_REPEATED_FAILURES = 3
"""After this many consecutive failures at the same step the program is at fault, and the run halts. After twice as many if it
restarted from older and older steps."""


def next_restore_step_limit(restore_step_limit: int | None, failure: Failure, budget: Budget) -> int | None:
    """Return the step below which to restore after one more failure; None: restore the newest step.

    If a roll-back did not go back far enough, the steps committed after it may be as bad as those that they replace. They are
    trusted unless the program failed by itself soon after them. Later steps, left from before the roll-back, are not trusted
    until a step newer than all earlier ones is committed.

    restore_step_limit: the limit that held for the failed attempt.
    failure: how that attempt ended.
    budget: the budget before that failure.
    """
    if restore_step_limit is None or failure.committed < restore_step_limit:
        return restore_step_limit
    if failure.committed > budget.best_step:
        return None
    is_soon_after_commit = failure.step - failure.committed <= SOON_STEPS
    return restore_step_limit if failure.is_of_program and is_soon_after_commit else failure.committed + 1


def decide(failures: Sequence[Failure], budget: Budget, skip: Ranges = (), restore_step_limit: int | None = None) -> Decision:
    """Return what to do after the last of these failures.

    failures: all failures of the run, the oldest first.
    budget: the budget before the last failure.
    skip: the batches that are already skipped.
    restore_step_limit: the step below which the last attempt had to restore; None if it was not limited.
    """
    after = budget.after(failures[-1], was_rolled_back=restore_step_limit is not None)
    limit = next_restore_step_limit(restore_step_limit, failures[-1], budget)
    return replace(_decide(failures, after, skip, limit), budget=after)


def _decide(failures: Sequence[Failure], budget: Budget, skip: Ranges, restore_step_limit: int | None) -> Decision:
    """Return the decision without its budget. budget, restore_step_limit: those after the last failure."""
    last = failures[-1]
    what = f"{describe_failure(last.ranks, last.detail, last.host)} {_describe_step(last)}"
    advice = f"look at {last.log or 'the log'}"
    if last.cause == "asked":
        return Decision("halt", what)
    if last.cause == "preempted":
        return Decision("restart", f"{what}; the others start again from the newest saved step")
    if last.cause == "straggler":
        return Decision("restart", f"{what}; all but {last.host} start again from the newest saved step")
    if last.cause == "unusable" and all(failure.step < 0 for failure in failures):
        return Decision("halt", f"{what}; another start would not change that{'; ' + advice if last.log else ''}")
    if last.bad is not None and budget.restarts_left >= 0:
        rollback = roll_back([failure.bad for failure in failures if failure.bad is not None], skip)
        action: Literal["restart", "halt"] = "halt" if rollback.action == "halt" else "restart"
        return Decision(
            action,
            rollback.reason,
            restore_step_limit=rollback.restore_step_limit,
            skip=rollback.skip,
            loss_limit=rollback.loss_limit,
        )
    alike = _count_alike(failures)
    restored_older = len(failures) > 1 and last.restored < failures[-2].restored
    if (
        budget.failures_without_progress >= MAX_REPEATED_FAILURES
        and alike >= MAX_REPEATED_FAILURES
        and (not restored_older or alike >= 2 * MAX_REPEATED_FAILURES)
    ):
        circumstance = "at the same place, with no newer step saved"
        if last.cause == "damaged":  # do not start from scratch over steps that may still be recovered
            circumstance = "as all saved steps are damaged; restore the files of one, or remove all of them to begin anew"
        return Decision("halt", f"{what}; {alike} times in a row, {circumstance}: {advice}")
    if budget.restarts_left < 0:
        return Decision("halt", f"{what}; {budget.max_restarts} restarts without a newer step: {advice}")
    wait = _wait_seconds(budget.failures_without_progress)
    blame = None
    if alike >= MAX_REPEATED_FAILURES - 1 and last.is_of_program:
        blame = f"it failed {alike} times at the same place"
    elif _has_failed_twice_soon_after_restore(failures):
        blame = "it failed twice soon after it"
    if blame and budget.failures_without_progress >= MAX_REPEATED_FAILURES - 1 and last.restored > 0:
        source = f"from a step before {last.restored}, which may be the reason: {blame}"
        return Decision(
            "restart", f"{what}; all ranks start again {source}", wait_seconds=wait, restore_step_limit=last.restored
        )
    source = (
        f"from a step before {restore_step_limit}" if restore_step_limit is not None
        else f"from the newest saved step ({last.committed} or later)" if last.committed >= 0
        else "from the newest saved step, if there is one"
    )  # fmt: skip
    return Decision("restart", f"{what}; all ranks start again {source}", wait_seconds=wait)


def _wait_seconds(failures_without_progress: int) -> float:
    """Return the wait before the next start: none after progress; longer after repeated failures, up to 30 s.

    Storage or the network may need time to recover.
    """
    if failures_without_progress <= 1:
        return 0.0
    return min(30.0, 0.5 * 2.0 ** min(failures_without_progress - 2, 10))  # limited, as the 1024th power of two is not a float


def _count_alike(failures: Sequence[Failure]) -> int:
    """Return how many of the last failures have the same cause at the same step.

    Lost hosts count 0: the step at which a host is lost is chance.
    """
    last = failures[-1]
    if last.cause == "lost":
        return 0
    if last.step < 0 and last.cause != "damaged" and any(f.step >= 0 for f in failures):
        return 0  # an earlier attempt made steps, so storage or the network is unavailable, and the program is not at fault
    same = takewhile(lambda f: (f.cause, f.step) == (last.cause, last.step) and not _has_run_long(f), reversed(failures))
    return sum(1 for _ in same)


def _has_failed_twice_soon_after_restore(failures: Sequence[Failure]) -> bool:
    """Return whether the program failed twice in a row soon after it restored the same step, at whichever steps it failed."""
    pair = failures[-2:]
    same = len({failure.restored for failure in pair}) == 1
    return len(pair) == 2 and same and all(failure.is_of_program and failure.is_soon_after_restore for failure in pair)


def _describe_step(failure: Failure) -> str:
    return f"after step {failure.step}" if failure.step >= 0 else "before the first step"
