"""Simulates days of training with failures, with the same decision functions as a real run.

`World` has numbers: how often things fail, and how long each phase takes. `Policy` has the interval between saves, and the
function that decides after a failure: by default `decide`, as in a real run. `daly_policy` returns one with Daly's interval.
Time jumps from one event to the next: a save, its commit, a failure, the return of a repaired host.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ckpt.recovery.goodput import ledger
from ckpt.recovery.goodput.time_category import TIME_CATEGORIES, TimeCategory
from ckpt.recovery.policy.failure import Cause, Failure
from ckpt.recovery.policy.restart_decision import Budget, Decision, decide
from ckpt.training.save_interval import daly_interval_seconds

_DECIDE_SECONDS = 0.01
"""The time to decide: one durable append to the run log."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One kind of failure."""

    cause: Cause
    share: float
    """The share of all failures, relative to the other kinds."""
    detect_seconds: float
    """The time from the last useful moment to the detection."""
    takes_host: bool = False
    """Whether the host is lost until it is repaired."""


FAILURE_KINDS = (
    FailureKind("signal", 0.5, 0.05),
    FailureKind("signal", 0.2, 4.0, takes_host=True),
    FailureKind("exit", 0.15, 0.05),
    FailureKind("hang", 0.1, 60.0),
    FailureKind("stopped", 0.05, 0.5),
)
"""Shares as in the logs of large clusters, roughly: most failures end a process, some take its host, some are silent."""


@dataclass(frozen=True, slots=True)
class World:
    """The simulated cluster and job. All times are in seconds."""

    hosts: int = 64
    ranks_per_host: int = 8
    host_mtbf_seconds: float = 64 * 3 * 3600.0
    """The mean time between failures of one host. All hosts together fail `hosts` times as often."""
    step_seconds: float = 1.0
    stall_seconds: float = 0.5
    """How long training waits for a save."""
    durable_seconds: float = 20.0
    """The time from the end of that wait to the commit."""
    stop_seconds: float = 0.1
    spawn_seconds: float = 10.0
    restore_seconds: float = 20.0
    spares: int = 0
    repair_seconds: float = 4 * 3600.0
    """The time until a lost host returns."""
    kinds: Sequence[FailureKind] = FAILURE_KINDS
    broken_step: int | None = None
    """A step that fails every time, because of a fault of the program; None none."""

    @property
    def mtbf_seconds(self) -> float:
        """The mean time between failures of the whole job."""
        return self.host_mtbf_seconds / self.hosts


@dataclass(frozen=True, slots=True)
class Policy:
    """The decisions of a run: how often it saves, and what it does after a failure."""

    interval_seconds: float
    """The time from the end of one save to the next save."""
    decide: Callable[[Sequence[Failure], Budget], Decision] = decide
    budget: Budget = field(default_factory=Budget)


def daly_policy(world: World) -> Policy:
    """Return the policy of every="auto" for a world whose numbers are all known."""
    return Policy(daly_interval_seconds(world.stall_seconds, world.mtbf_seconds))


@dataclass(slots=True)
class Outcome:
    """The result of one simulated run."""

    wall_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(map(str, TIME_CATEGORIES), 0.0))
    """The seconds of each category of the goodput ledger. Their sum is the wall time."""
    decisions: Counter[str] = field(default_factory=Counter)
    """The number of decisions, by action."""
    failures: Counter[str] = field(default_factory=Counter)
    """The number of failures, by cause."""
    saves: int = 0
    """The number of committed saves."""
    best_step: int = -1
    """The newest step that was ever done."""
    committed: int = -1
    """The newest committed step; -1 none."""
    redone_steps: int = 0
    resume_steps: list[int] = field(default_factory=list)
    """The first step of each attempt."""
    halt_reason: str = ""
    """Why the run was given up; "" if it was not."""

    @property
    def goodput(self) -> float:
        """The useful share of the time, 0 to 1."""
        return ledger.goodput(self.seconds)


def simulate(world: World, policy: Policy, days: float, seed: int = 0) -> Outcome:
    """Simulate some days of training and return the result. The run may be given up earlier.

    The same seed gives the same failures under any policy.
    """
    run = _Simulation(world, policy, days * 86400.0, random.Random(seed))
    run.play()
    return run.outcome


_PROGRAM_FAILURE = FailureKind("exit", 0.0, 0.05)


@dataclass(frozen=True, slots=True)
class _FailureEvent:
    """A failure at some time in the future."""

    at: float
    kind: FailureKind
    rank: int


class _SimulationEnded(Exception):
    """The simulated days are over."""


class _JobFailed(Exception):
    """A failure has happened now."""


class _Simulation:
    """One simulated run. `play` fills in `outcome`."""

    def __init__(self, world: World, policy: Policy, until: float, random_source: random.Random) -> None:
        self._world, self._policy, self._until, self._random = world, policy, until, random_source
        self.outcome = Outcome()
        self._next_failure = self._draw_failure(0.0)  # depends on the clock alone, so all policies meet the same failures
        self._last_failure: _FailureEvent | None = None  # None: the last failure was one of the program
        self._repair_times: list[float] = []  # when lost hosts return
        self._free_spares = world.spares
        self._pending_save: tuple[float, int] | None = None  # a save under way: the time of its commit, and its step
        self._step = -1  # the last step of this attempt

    def play(self) -> None:
        """Run attempts until the days are over or a decision halts the run."""
        budget, failures = self._policy.budget, []
        try:
            while True:
                began = self.outcome.wall_seconds
                failures.append(self._run_attempt(began))
                decision = self._policy.decide(failures, budget)
                budget = decision.budget
                self.outcome.decisions[decision.action] += 1
                self._spend("decide", _DECIDE_SECONDS)
                if decision.action == "halt":
                    self.outcome.halt_reason = decision.reason
                    return
                self._spend("wait", decision.wait_seconds)
                self._replace_lost_host()
        except _SimulationEnded:
            return

    # --- one attempt -------------------------------------------------------------------------------------------

    def _run_attempt(self, began: float) -> Failure:
        """Run an attempt until it fails, and return the failure. Raises _SimulationEnded if the days are over before."""
        world, outcome = self._world, self.outcome
        self._step, restored = -1, -1
        try:
            self._spend_at_risk("spawn", world.spawn_seconds)
            self._spend_at_risk("restore", world.restore_seconds)
            self._step = restored = outcome.committed
            outcome.resume_steps.append(restored + 1)
            self._train()
        except _JobFailed:
            pass
        self._commit_pending(outcome.wall_seconds)
        self._pending_save = None  # a save under way is lost with the ranks
        kind, rank = (_PROGRAM_FAILURE, 0) if self._last_failure is None else (self._last_failure.kind, self._last_failure.rank)
        outcome.failures[kind.cause] += 1
        self._spend("detect", kind.detect_seconds)
        self._spend("stop", world.stop_seconds)
        # Ranks that have neither restored nor made a step report no committed step.
        known_committed = outcome.committed if restored >= 0 or self._step >= 0 else -1
        return Failure(
            kind.cause, (rank,), "failed", self._step, known_committed, outcome.wall_seconds - began, restored=restored
        )

    def _train(self) -> None:
        """Save after the first step, then train for an interval and save, until a failure or the end of the days."""
        step_seconds = self._world.step_seconds
        interval_steps = max(1, math.ceil(self._policy.interval_seconds / step_seconds - 1e-9))
        if self._step < 0:
            self._train_steps(1)
            self._save()
        while True:
            self._train_steps(interval_steps)
            while self._pending_save is not None:  # a save waits for the one before
                remaining = self._pending_save[0] - self.outcome.wall_seconds
                self._train_steps(max(1, math.ceil(remaining / step_seconds - 1e-9)))
            self._save()
            self._skip_ahead(max(interval_steps, math.ceil(self._world.durable_seconds / step_seconds - 1e-9)))

    def _skip_ahead(self, steps: int) -> None:
        """Right after a save, repeat `steps` and a save at once, as often as nothing else happens in between."""
        world, outcome = self._world, self.outcome
        remaining = min(self._next_failure.at, self._until) - outcome.wall_seconds
        rounds = int(remaining / (steps * world.step_seconds + world.stall_seconds)) - 1
        if world.broken_step is not None and world.broken_step > self._step:
            rounds = min(rounds, (world.broken_step - self._step) // steps - 1)
        if rounds < 1 or self._step < outcome.best_step:
            return
        self._spend("useful", rounds * steps * world.step_seconds)
        self._spend("stall", rounds * world.stall_seconds)
        self._step += rounds * steps
        outcome.best_step = self._step
        outcome.committed = self._step - steps
        outcome.saves += rounds - 1 + (self._pending_save is not None)
        self._pending_save = (outcome.wall_seconds + world.durable_seconds, self._step)

    def _train_steps(self, count: int) -> None:
        """Do some steps. The first of them may be repeated ones."""
        while count > 0:
            redone = min(count, max(0, self.outcome.best_step - self._step))
            uniform_count = redone or count
            broken = self._world.broken_step
            if broken is not None and self._step < broken <= self._step + uniform_count:
                uniform_count = broken - self._step - 1
                self._spend_steps(uniform_count, redone > 0)
                self._spend_at_risk("useful", self._world.step_seconds)
                self._last_failure = None
                raise _JobFailed
            self._spend_steps(uniform_count, redone > 0)
            count -= uniform_count

    def _spend_steps(self, count: int, is_redo: bool) -> None:
        """Do steps that are all new or all repeated."""
        began, step_seconds = self.outcome.wall_seconds, self._world.step_seconds
        try:
            self._spend_at_risk("redo" if is_redo else "useful", count * step_seconds)
            done = count
        except (_JobFailed, _SimulationEnded):
            done = min(count, int((self.outcome.wall_seconds - began) / step_seconds + 1e-9))
            raise
        finally:
            self._step += done
            self.outcome.best_step = max(self.outcome.best_step, self._step)
            self.outcome.redone_steps += done if is_redo else 0
            self._commit_pending(self.outcome.wall_seconds)

    def _save(self) -> None:
        self._spend_at_risk("stall", self._world.stall_seconds)
        self._pending_save = (self.outcome.wall_seconds + self._world.durable_seconds, self._step)
        self._commit_pending(self.outcome.wall_seconds)

    def _commit_pending(self, moment: float) -> None:
        if self._pending_save is not None and self._pending_save[0] <= moment:
            self.outcome.committed = max(self.outcome.committed, self._pending_save[1])
            self.outcome.saves += 1
            self._pending_save = None

    # --- hosts and time ----------------------------------------------------------------------------------------

    def _replace_lost_host(self) -> None:
        """Replace a lost host by a spare. Without a spare, the job waits for a repair."""
        if self._last_failure is None or not self._last_failure.kind.takes_host:
            return
        now = self.outcome.wall_seconds
        self._repair_times.append(now + self._world.repair_seconds)
        self._free_spares += sum(at <= now for at in self._repair_times)
        self._repair_times = [at for at in self._repair_times if at > now]
        if self._free_spares == 0:
            repaired_at = min(self._repair_times)
            self._spend("wait", repaired_at - now)
            self._repair_times.remove(repaired_at)
            self._free_spares += 1
        self._free_spares -= 1

    def _spend_at_risk(self, name: TimeCategory, seconds: float) -> None:
        """Spend time in which a failure may happen."""
        now = self.outcome.wall_seconds
        while self._next_failure.at < now:  # a failure while nothing ran has no effect
            self._next_failure = self._draw_failure(self._next_failure.at)
        failure = self._next_failure
        if failure.at >= now + seconds:
            self._spend(name, seconds)
            return
        self._spend(name, failure.at - now)
        self._last_failure, self._next_failure = failure, self._draw_failure(failure.at)
        raise _JobFailed

    def _spend(self, name: TimeCategory, seconds: float) -> None:
        """Spend time on a category. Raises _SimulationEnded at the end of the days."""
        remaining = self._until - self.outcome.wall_seconds
        spent = min(seconds, remaining)
        self.outcome.seconds[name] += spent
        self.outcome.wall_seconds += spent
        if seconds >= remaining:
            self.outcome.wall_seconds = self._until
            raise _SimulationEnded

    def _draw_failure(self, moment: float) -> _FailureEvent:
        world, random_source = self._world, self._random
        at = moment + random_source.expovariate(1.0 / world.mtbf_seconds)
        kind = random_source.choices(world.kinds, [kind.share for kind in world.kinds])[0]
        return _FailureEvent(at, kind, random_source.randrange(world.hosts * world.ranks_per_host))


# --- many runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IntervalOutcome:
    """The results of one interval, over several seeds."""

    interval_seconds: float
    daly: bool
    """Whether it is the interval of every="auto"."""
    goodputs: tuple[float, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def goodput(self) -> float:
        """The mean goodput of all seeds, 0 to 1."""
        return fmean(self.goodputs)

    def mean(self, name: TimeCategory) -> float:
        """Return the mean share of the time that was spent on a category."""
        return fmean(outcome.seconds[name] / outcome.wall_seconds for outcome in self.outcomes)


def simulate_intervals(world: World, days: float, seeds: int, intervals: Sequence[float] = ()) -> list[IntervalOutcome]:
    """Simulate several intervals with the same failures, by default Daly's interval and others around it.

    An interval shorter than a save gives the same result as one of that length, because a save waits for the one before.
    """
    best = daly_policy(world).interval_seconds
    around = [best * factor for factor in _INTERVAL_FACTORS if best * factor >= world.durable_seconds]
    points = []
    for interval in sorted({*(intervals or around), best}):
        outcomes = tuple(simulate(world, Policy(interval), days, seed) for seed in range(seeds))
        points.append(IntervalOutcome(interval, interval == best, tuple(outcome.goodput for outcome in outcomes), outcomes))
    return points


_INTERVAL_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1 / 1.4, 1.4, 2, 4, 8, 16)
