"""The decision after an attempt has ended: restart or halt, from which step, on which hosts. Pure.

The coordinator of a run and the simulator call the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Literal

from ckpt.recovery.policy.loss_rollback import roll_back
from ckpt.training.data_position import Ranges
from ckpt.training.rank_heartbeat import BadLoss

Cause = Literal[
    "exit", "unusable", "damaged", "signal", "out of memory", "hang", "stopped", "lost", "diverged", "preempted", "straggler",
    "asked",
]  # fmt: skip

PLANNED_CAUSES: frozenset[Cause] = frozenset({"preempted", "straggler", "asked"})
"""Causes that are not failures: all ranks were requested to save and end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended."""

    cause: Cause
    ranks: tuple[int, ...]
    """The ranks that failed first. The other ranks were stopped because of them."""
    detail: str
    """Text: what happened to these ranks."""
    step: int
    """The last step that all ranks had done; -1 none."""
    committed: int
    """The newest committed step; -1 none."""
    ran_seconds: float
    host: str = ""
    """The host of the ranks that failed first."""
    bad: BadLoss | None = None
    """The loss that was not finite or jumped, if the cause is "diverged"."""
    log: str = ""
    """The log file of the first of these ranks; "" if there is none."""
    restored: int = -1
    """The step that this attempt resumed from; -1 none."""
    durable: int = -1
    """The newest step that is committed outside of the memory of hosts; -1 none."""
    step_seconds: float = 0.0
    """The duration of one step."""
    line: int = 0
    """The line of training of the newest committed step; 0 if this attempt committed none."""

    @property
    def newest_committed(self) -> tuple[int, int]:
        """Line and number of the newest committed step. A step of a later line is newer, whatever its number."""
        return self.line, self.committed


@dataclass(frozen=True, slots=True)
class Budget:
    """The number of restarts that are left. Progress resets it to `max_restarts`."""

    max_restarts: int = 10
    restarts_left: int = 10
    failures_without_progress: int = 0
    """Consecutive attempts that failed without a newer committed step."""
    best_step: int = -1
    """The newest step that was ever committed. After the program has rolled back by itself: the newest of the new line."""
    line: int = 0
    """The newest line of training of a committed step."""
    restored: int = -1
    """The step that the last attempt resumed from; -1 none."""

    def after(self, failure: Failure, sent_back: bool = False) -> Budget:
        """Return the budget after one more failed attempt.

        Steps that a program saves after a roll-back of its own are newer than those it left behind, so they are progress. A
        roll-back counts once per restored step: a program that returns to the same step at each start makes no progress.

        failure: how the attempt ended.
        sent_back: whether `ckpt-run` made the attempt restore an older step than the newest.
        """
        if failure.cause in PLANNED_CAUSES:
            return self
        went_back = failure.line > self.line and failure.restored != self.restored and not sent_back
        now = replace(self, line=max(self.line, failure.line), restored=failure.restored)
        if went_back or failure.committed > self.best_step or _has_run_long(failure):
            best = failure.committed if went_back else max(self.best_step, failure.committed)
            return replace(now, restarts_left=self.max_restarts - 1, failures_without_progress=0, best_step=best)
        return replace(now, restarts_left=self.restarts_left - 1, failures_without_progress=self.failures_without_progress + 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action, and why."""

    action: Literal["restart", "halt"]
    reason: str
    wait_seconds: float = 0.0
    before: int | None = None
    """Restore a step before this one, because this step and later ones may be bad."""
    skip: Ranges | None = None
    """Batches to skip from now on; None: the same batches as before."""
    limit: float | None = None
    """The loss above which a rank reports a bad loss, until it has seen enough losses to judge by itself."""
    budget: Budget = Budget()


LONG_RUN_SECONDS = 600.0
"""Ranks that report no steps and ran for this long count as having made progress."""


def _has_run_long(failure: Failure) -> bool:
    return failure.step < 0 and failure.ran_seconds >= LONG_RUN_SECONDS


MAX_REPEATED_FAILURES = 3
"""After this many consecutive failures at the same step the program is at fault, and the run halts."""


_SOON_STEPS = 32
"""A failure within this many steps of a restore may be caused by the restored step."""


def next_restore_step_limit(before: int | None, failure: Failure, budget: Budget) -> int | None:
    """Return the step below which to restore after one more failure; None: restore the newest step.

    If a roll-back did not go back far enough, the steps committed after it may be as bad as those that they replace. They are
    trusted unless the program failed by itself soon after them. Later steps, left from before the roll-back, are not trusted
    until a step newer than all earlier ones is committed.

    before: the limit that held for the failed attempt.
    failure: how that attempt ended.
    budget: the budget before that failure.
    """
    if before is None or failure.committed < before:
        return before
    if failure.committed > budget.best_step:
        return None
    soon = failure.step - failure.committed <= _SOON_STEPS
    return before if _is_program_failure(failure) and soon else failure.committed + 1


def decide(failures: Sequence[Failure], budget: Budget, skip: Ranges = (), before: int | None = None) -> Decision:
    """Return what to do after the last of these failures.

    failures: all failures of the run, the oldest first.
    budget: the budget before the last failure.
    skip: the batches that are already skipped.
    before: the step below which the last attempt had to restore; None if it was not limited.
    """
    now = budget.after(failures[-1], before is not None)
    return replace(_decide(failures, now, skip, next_restore_step_limit(before, failures[-1], budget)), budget=now)


def _decide(failures: Sequence[Failure], now: Budget, skip: Ranges, before: int | None) -> Decision:
    last = failures[-1]
    what, advice = (
        f"{describe_failure(last.ranks, last.detail, last.host)} {_describe_step(last)}",
        f"look at {last.log or 'the log'}",
    )
    if last.cause == "asked":
        return Decision("halt", what)
    if last.cause == "preempted":
        return Decision("restart", f"{what}; the others start again from what was saved")
    if last.cause == "straggler":
        return Decision("restart", f"{what}; all start again from what was saved, and leave {last.host} out")
    if last.cause == "unusable" and all(failure.step < 0 for failure in failures):
        return Decision("halt", f"{what}; another start would not change that{'; ' + advice if last.log else ''}")
    if last.bad is not None and now.restarts_left >= 0:
        rollback = roll_back([failure.bad for failure in failures if failure.bad is not None], skip)
        action: Literal["restart", "halt"] = "halt" if rollback.action == "halt" else "restart"
        return Decision(action, rollback.reason, before=rollback.before, skip=rollback.skip, limit=rollback.limit)
    alike = _count_alike(failures)
    older = len(failures) > 1 and last.restored < failures[-2].restored  # an older step than the attempt before restored
    if (
        now.failures_without_progress >= MAX_REPEATED_FAILURES
        and alike >= MAX_REPEATED_FAILURES
        and (not older or alike >= 2 * MAX_REPEATED_FAILURES)
    ):
        circumstance = "at the same place, with no newer step saved"
        if last.cause == "damaged":  # do not start from scratch over steps that may still be recovered
            circumstance = "as no saved step is whole; bring back the files of one, or remove all of them to begin anew"
        return Decision("halt", f"{what}; {alike} times in a row, {circumstance}: {advice}")
    if now.restarts_left < 0:
        return Decision("halt", f"{what}; {now.max_restarts} restarts without a newer step: {advice}")
    # Restart at once after progress. After repeated failures wait: storage or the network may need time to recover.
    wait = 0.0 if now.failures_without_progress <= 1 else min(30.0, 0.5 * 2.0 ** (now.failures_without_progress - 2))
    blamed = (alike >= MAX_REPEATED_FAILURES - 1 and _is_program_failure(last)) or _has_failed_twice_soon(failures)
    if now.failures_without_progress >= MAX_REPEATED_FAILURES - 1 and last.restored > 0 and blamed:
        times = "it failed at the same place" if alike > MAX_REPEATED_FAILURES else "it failed twice soon after it"
        source = f"from a step before {last.restored}, which may be the reason: {times}"
        return Decision("restart", f"{what}; all ranks start again {source}", wait, last.restored)
    source = (
        f"from a step before {before}" if before is not None
        else f"from step {last.committed}, or a newer one" if last.committed >= 0
        else "from what is saved, if anything"
    )  # fmt: skip
    return Decision("restart", f"{what}; all ranks start again {source}", wait)


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


def _has_failed_twice_soon(failures: Sequence[Failure]) -> bool:
    """Return whether the program failed twice in a row soon after it restored the same step, at whichever steps it failed."""
    pair = failures[-2:]
    same = len({failure.restored for failure in pair}) == 1
    return len(pair) == 2 and same and all(_is_program_failure(failure) and _is_soon(failure) for failure in pair)


def _is_soon(failure: Failure) -> bool:
    return 0 <= failure.step - failure.restored <= _SOON_STEPS


def _is_program_failure(failure: Failure) -> bool:
    """Return whether the program itself failed. SIGKILL and SIGTERM come from outside: no program ends itself by them."""
    if failure.cause == "signal":
        return not failure.detail.endswith(("SIGKILL", "SIGTERM"))
    return failure.cause in ("exit", "hang")


_RETURN_SECONDS = 10.0
"""The shortest wait for a silent host: a restart costs about this much in any case."""


def worth_waiting_seconds(steps: int, step_seconds: float, most: float) -> float:
    """Return how long to wait for a silent host that may have the only copies of the newest steps.

    That is as long as it takes to repeat these steps. Whether the host returns is unknown. With this rule the total cost is
    at most about twice that of the better choice.

    steps: the number of steps that only the memory of hosts has.
    step_seconds: the duration of one step.
    most: the longest wait.
    """
    return min(most, max(_RETURN_SECONDS, steps * step_seconds)) if steps > 0 else 0.0


# --- hosts of the next attempt -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostChoice:
    """The hosts of the next attempt, in the order of their ranks."""

    hosts: tuple[str, ...]
    reason: str
    """Text: what has changed since the attempt before; "" nothing."""


def suspected_hosts(failures: Sequence[Failure]) -> frozenset[str]:
    """Return the hosts that may be faulty: those of stragglers, and those where two consecutive failures began.

    Two failures count if no newer step was committed between them, or if both came soon after the restore: a job that saves
    every step always has a newer one.
    """
    found = {failure.host for failure in failures if failure.cause == "straggler"}
    for one, other in pairwise(failures):
        alike = other.newest_committed <= one.newest_committed or (
            one.cause not in PLANNED_CAUSES and _is_soon(one) and _is_soon(other)
        )
        if one.host == other.host and alike and other.cause not in PLANNED_CAUSES:
            found.add(other.host)
    return frozenset(found)


def choose_hosts(
    before: Sequence[str], ready: Sequence[str], suspected: Set[str], target_hosts: int, min_hosts: int, has_waited: bool
) -> HostChoice | None:
    """Return the hosts of the next attempt; None: wait for more hosts.

    Hosts keep their positions. A spare takes the position of a missing host. After the wait, fewer hosts are enough. A
    suspected host is used only if there are not enough hosts without it.

    before: the hosts of the attempt before, in the order of their ranks.
    ready: all hosts that could take part, in the order of arrival.
    suspected: hosts that may be faulty.
    target_hosts: how many hosts take part if there are enough.
    min_hosts: how many hosts are enough after the wait.
    has_waited: whether the wait is over.
    """
    good = [name for name in ready if name not in suspected]
    if len(good) < target_hosts and not has_waited and len(ready) < target_hosts:
        return None
    usable = good if len(good) >= (target_hosts if not has_waited else min_hosts) else list(ready)
    if len(usable) < (min_hosts if has_waited else target_hosts):
        return None
    spares = [name for name in usable if name not in before]
    chosen: list[str] = []
    for name in before:
        if name in usable:
            chosen.append(name)
        elif spares:
            chosen.append(spares.pop(0))
    hosts = tuple((chosen + spares)[:target_hosts])
    return HostChoice(hosts, _describe_changes(before, hosts, ready, suspected) if before else "")


def _describe_changes(before: Sequence[str], hosts: Sequence[str], ready: Sequence[str], suspected: Set[str]) -> str:
    removed = [name for name in before if name not in hosts]
    added = [name for name in hosts if name not in before]
    parts = []
    if removed:
        why = ["suspected" if n in suspected and n in ready else "not needed" if n in ready else "gone" for n in removed]
        parts.append("without " + ", ".join(f"{name} ({w})" for name, w in zip(removed, why, strict=True)))
    if added:
        parts.append(f"with {', '.join(added)} instead" if removed else f"with {', '.join(added)}")
    return " ".join(parts)


# --- texts for people --------------------------------------------------------------------------------------------


def _describe_step(failure: Failure) -> str:
    return f"after step {failure.step}" if failure.step >= 0 else "before the first step"


def describe_failure(ranks: Sequence[int], detail: str, host: str = "") -> str:
    """Return a text that names the ranks and what happened to them. If `ranks` is empty, the whole host failed."""
    if not ranks:
        return f"host {host} {detail}"
    verb, _, rest = detail.partition(" ")
    forms = {"was": "were", "has": "have"} if len(ranks) > 1 else {"were": "was", "have": "has"}
    who = "rank" if len(ranks) == 1 else "ranks"
    return f"{who} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''} {forms.get(verb, verb)} {rest}"
