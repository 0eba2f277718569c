"""What to do when a job has stopped. Pure: the live coordinator and the simulator call the same, and tests need no clock."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Literal

from ckpt.recovery.policy.loss_rollback import roll_back
from ckpt.training.data_position import Ranges
from ckpt.training.heartbeat_page import BadLoss

Cause = Literal[
    "exit", "unusable", "damaged", "signal", "out of memory", "hang", "stopped", "lost", "diverged", "preempted", "straggler",
    "asked",
]  # fmt: skip

PLANNED_CAUSES: frozenset[Cause] = frozenset({"preempted", "straggler", "asked"})
"""Ends that were no failures of ranks: all were to save and to end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended."""

    cause: Cause
    ranks: tuple[int, ...]
    """Those that failed first; the others were stopped for it."""
    detail: str
    """In words: what happened to them."""
    step: int
    """The last step that all had done; -1 none."""
    committed: int
    """The newest committed step; -1 none."""
    ran_seconds: float
    host: str = ""
    """Whose ranks failed first."""
    bad: BadLoss | None = None
    """The loss by which it diverged."""
    log: str = ""
    """The file of what the first of them has said; "" where there is none."""
    restored: int = -1
    """The step that this attempt went on from; -1 none."""
    durable: int = -1
    """The newest step that is committed in another place than the memory of hosts; -1 none."""
    step_seconds: float = 0.0
    """What a step took."""
    line: int = 0
    """The line of training of the newest committed step; 0 where this attempt committed none."""

    @property
    def newest_committed(self) -> tuple[int, int]:
        """The newest committed step in the order of steps: a step of a later line is newer, whatever its number."""
        return self.line, self.committed


@dataclass(frozen=True, slots=True)
class Budget:
    """How many restarts are left. Progress fills it again."""

    max_restarts: int = 10
    restarts_left: int = 10
    failures_without_progress: int = 0
    """Failures in a row after which no newer step was committed."""
    best_step: int = -1
    """The newest step that was ever committed. Of another line of training than before, once the program has gone back to a
    step by itself."""
    line: int = 0
    """The newest line of training of a committed step."""
    restored: int = -1
    """The step that the last attempt went on from; -1 none."""

    def after(self, failure: Failure, sent_back: bool = False) -> Budget:
        """With one attempt more. sent_back: `ckpt-run` had let it restore an older step than the newest.

        What a program saves after a roll-back of its own is newer than what it has left behind. That counts once: a program
        that goes back to the same step at each start, and fails, gets no further.
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
    """What is done next, and why."""

    action: Literal["restart", "halt"]
    reason: str
    wait_seconds: float = 0.0
    before: int | None = None
    """Restore a step before this one: those from it on may be spoiled."""
    skip: Ranges | None = None
    """Batches to pass over from now on; None as before."""
    limit: float | None = None
    """What loss is too much, until the ranks have seen enough."""
    budget: Budget = Budget()


LONG_RUN_SECONDS = 600.0
"""Ranks that do not say what they do, and ran for so long, got on."""


def _has_run_long(failure: Failure) -> bool:
    return failure.step < 0 and failure.ran_seconds >= LONG_RUN_SECONDS


MAX_REPEATED_FAILURES = 3
"""So many failures in a row at the same place, and it is the program that must be mended."""


_SOON_STEPS = 32
"""What fails within so many steps of a restore may fail for what was restored."""


def next_restore_limit(before: int | None, failure: Failure, budget: Budget) -> int | None:
    """The step below which to restore, after a failure more; None: the newest that there is. budget: before the failure.

    Steps that were made anew after a roll-back may be as bad as those that they replace, if it was not far enough. They are
    trusted where the job did not fail of itself soon after them; the ones behind them, that were there before, are not, until
    it has got on to a newer one than ever.
    """
    if before is None or failure.committed < before:
        return before
    if failure.committed > budget.best_step:
        return None
    soon = failure.step - failure.committed <= _SOON_STEPS
    return before if _is_program_failure(failure) and soon else failure.committed + 1


def decide(failures: Sequence[Failure], budget: Budget, skip: Ranges = (), before: int | None = None) -> Decision:
    """What to do after the last of these failures. budget: before it. skip: batches that are passed over already. before: the
    step below which the last attempt had to restore, if any."""
    now = budget.after(failures[-1], before is not None)
    return replace(_decide(failures, now, skip, next_restore_limit(before, failures[-1], budget)), budget=now)


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
    older = len(failures) > 1 and last.restored < failures[-2].restored  # than at the try before
    if (
        now.failures_without_progress >= MAX_REPEATED_FAILURES
        and alike >= MAX_REPEATED_FAILURES
        and (not older or alike >= 2 * MAX_REPEATED_FAILURES)
    ):
        circumstance = "at the same place, with no newer step saved"
        if last.cause == "damaged":  # and nothing is begun anew over what may still be brought back
            circumstance = "as no saved step is whole; bring back the files of one, or remove all of them to begin anew"
        return Decision("halt", f"{what}; {alike} times in a row, {circumstance}: {advice}")
    if now.restarts_left < 0:
        return Decision("halt", f"{what}; {now.max_restarts} restarts without a newer step: {advice}")
    # At once after progress; where it fails again and again, something outside may need time.
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
    """How many of the last came in the same way, at the same place. Hosts are lost wherever a job is just then."""
    last = failures[-1]
    if last.cause == "lost":
        return 0
    if last.step < 0 and last.cause != "damaged" and any(f.step >= 0 for f in failures):
        return 0  # it has begun before: it is not the program that must be mended, but storage or a network that is away
    same = takewhile(lambda f: (f.cause, f.step) == (last.cause, last.step) and not _has_run_long(f), reversed(failures))
    return sum(1 for _ in same)


def _has_failed_twice_soon(failures: Sequence[Failure]) -> bool:
    """Whether the last two came of themselves, soon after the same step was restored, wherever each did."""
    pair = failures[-2:]
    same = len({failure.restored for failure in pair}) == 1
    return len(pair) == 2 and same and all(_is_program_failure(failure) and _is_soon(failure) for failure in pair)


def _is_soon(failure: Failure) -> bool:
    return 0 <= failure.step - failure.restored <= _SOON_STEPS


def _is_program_failure(failure: Failure) -> bool:
    """Not by what comes from outside: no program ends itself by these signals."""
    if failure.cause == "signal":
        return not failure.detail.endswith(("SIGKILL", "SIGTERM"))
    return failure.cause in ("exit", "hang")


_RETURN_SECONDS = 10.0
"""A restart costs about as much in any case."""


def worth_waiting_seconds(steps: int, step_seconds: float, most: float) -> float:
    """How long to wait for a silent host that may have the only copies of the newest steps.

    As long as doing these steps again would take. Whether the host returns is not known; so the wait costs at most about as
    much again as the better choice would. steps: that only the memory of hosts has. most: the limit.
    """
    return min(most, max(_RETURN_SECONDS, steps * step_seconds)) if steps > 0 else 0.0


# --- who takes part ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostChoice:
    """The hosts of the next attempt, in the order of their ranks."""

    hosts: tuple[str, ...]
    reason: str
    """What is other than before, in words; "" nothing."""


def suspected_hosts(failures: Sequence[Failure]) -> frozenset[str]:
    """Hosts where two failures in a row began, it may be the host: with no newer step saved in between, or both soon after the
    ranks had begun, for where each step is saved there always is a newer one. And stragglers."""
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
    """Who takes part in the next attempt; None: wait for more hosts.

    The same hosts in the same places; else a spare in the place of one that is gone; else, after waiting, fewer. A suspected
    host only where it can't be done without it. before: the hosts of the attempt before. ready: all that could take part,
    who came first first. waited: whether it was waited long enough.
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
    gone = [name for name in before if name not in hosts]
    come = [name for name in hosts if name not in before]
    parts = []
    if gone:
        why = ["suspected" if n in suspected and n in ready else "not needed" if n in ready else "gone" for n in gone]
        parts.append("without " + ", ".join(f"{name} ({w})" for name, w in zip(gone, why, strict=True)))
    if come:
        parts.append(f"with {', '.join(come)} instead" if gone else f"with {', '.join(come)}")
    return " ".join(parts)


# --- in words ----------------------------------------------------------------------------------------------------


def _describe_step(failure: Failure) -> str:
    return f"after step {failure.step}" if failure.step >= 0 else "before the first step"


def describe_failure(ranks: Sequence[int], detail: str, host: str = "") -> str:
    """Who, and what has happened to them. host: where it is all of it."""
    if not ranks:
        return f"host {host} {detail}"
    verb, _, rest = detail.partition(" ")
    forms = {"was": "were", "has": "have"} if len(ranks) > 1 else {"were": "was", "have": "has"}
    who = "rank" if len(ranks) == 1 else "ranks"
    return f"{who} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''} {forms.get(verb, verb)} {rest}"
