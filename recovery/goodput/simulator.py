"""Plays out days of training with failures in a moment, by the very decisions that the live coordinator takes.

The world (`World`) is numbers: how often what breaks, how long each thing takes. What is decided (`Policy`) is functions: by
default `decide` and `daly`, as they are live; another one can be given. Time jumps from one event to the next: a save, its
commit, a failure, a host that comes back from repair.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ckpt.recovery.goodput.ledger import TIME_CATEGORIES, TimeCategory
from ckpt.recovery.goodput.ledger import goodput as share
from ckpt.recovery.policy.decide import Budget, Cause, Decision, Failure, decide
from ckpt.training.save_interval import daly_interval_seconds

_DECIDE_SECONDS = 0.01
"""A record that is made durable."""


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One way to fail."""

    cause: Cause
    share: float
    """Of all failures, relative to the others."""
    detect_seconds: float
    """From the last useful moment to the notice."""
    takes_host: bool = False
    """The host is gone until it is repaired."""


FAILURE_KINDS = (
    FailureKind("signal", 0.5, 0.05),
    FailureKind("signal", 0.2, 4.0, takes_host=True),
    FailureKind("exit", 0.15, 0.05),
    FailureKind("hang", 0.1, 60.0),
    FailureKind("stopped", 0.05, 0.5),
)
"""About what logs of large clusters show: most failures end a process, some take its host, some are silent."""


@dataclass(frozen=True, slots=True)
class World:
    """What training meets with. All times in seconds."""

    hosts: int = 64
    ranks_per_host: int = 8
    host_mtbf_seconds: float = 64 * 3 * 3600.0
    """Mean time between failures of one host; all together fail `hosts` times as often."""
    step_seconds: float = 1.0
    stall_seconds: float = 0.5
    """Training waits so long for a save."""
    durable_seconds: float = 20.0
    """From the end of the stall to the commit."""
    stop_seconds: float = 0.1
    spawn_seconds: float = 10.0
    restore_seconds: float = 20.0
    spares: int = 0
    repair_seconds: float = 4 * 3600.0
    """Until a host that was lost is back."""
    kinds: Sequence[FailureKind] = FAILURE_KINDS
    broken_step: int | None = None
    """A step that fails every time: the program must be mended."""

    @property
    def mtbf_seconds(self) -> float:
        """Of the whole job."""
        return self.host_mtbf_seconds / self.hosts


@dataclass(frozen=True, slots=True)
class Policy:
    """What is decided, and how often is saved."""

    interval_seconds: float
    """From the end of one save to the next."""
    decide: Callable[[Sequence[Failure], Budget], Decision] = decide
    budget: Budget = field(default_factory=Budget)


def daly_policy(world: World) -> Policy:
    """As every="auto" has it, with all known."""
    return Policy(daly_interval_seconds(world.stall_seconds, world.mtbf_seconds))


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    wall_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(map(str, TIME_CATEGORIES), 0.0))
    """By the names of the ledger; their sum is the wall time."""
    decisions: Counter[str] = field(default_factory=Counter)
    """By action."""
    failures: Counter[str] = field(default_factory=Counter)
    """By cause."""
    saves: int = 0
    """That were committed."""
    best_step: int = -1
    """The newest step that was ever done."""
    committed: int = -1
    redone_steps: int = 0
    resume_steps: list[int] = field(default_factory=list)
    """The step at which each attempt went on."""
    halt_reason: str = ""
    """Why it was given up."""

    @property
    def goodput(self) -> float:
        return share(self.seconds)


def simulate(world: World, policy: Policy, days: float, seed: int = 0) -> Outcome:
    """So many days of training, or less where it is given up. The same seed gives the same failures under any policy."""
    run = _Simulation(world, policy, days * 86400.0, random.Random(seed))
    run.play()
    return run.outcome


_PROGRAM_FAILURE = FailureKind("exit", 0.0, 0.05)


@dataclass(frozen=True, slots=True)
class _FailureEvent:
    """Something that will break."""

    at: float
    kind: FailureKind
    rank: int


class _SimulationEnded(Exception):
    """The days are over."""


class _JobFailed(Exception):
    """Something broke, just now."""


class _Simulation:
    def __init__(self, world: World, policy: Policy, until: float, random_source: random.Random) -> None:
        self._world, self._policy, self._until, self._random = world, policy, until, random_source
        self.outcome = Outcome()
        self._next_failure = self._draw_failure(0.0)  # drawn by the clock alone, so that no policy changes what comes
        self._last_failure: _FailureEvent | None = None  # the last one; None: the program itself
        self._repair_times: list[float] = []  # when hosts come back
        self._free_spares = world.spares
        self._pending_save: tuple[float, int] | None = None  # a save under way: when it will be committed, its step
        self._step = -1  # done last in this attempt

    def play(self) -> None:
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
        """Until it fails; raises _End where the days are over first."""
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
        self._pending_save = None  # what was under way is lost with the ranks
        kind, rank = (_PROGRAM_FAILURE, 0) if self._last_failure is None else (self._last_failure.kind, self._last_failure.rank)
        outcome.failures[kind.cause] += 1
        self._spend("detect", kind.detect_seconds)
        self._spend("stop", world.stop_seconds)
        known_committed = (
            outcome.committed if restored >= 0 or self._step >= 0 else -1
        )  # ranks that never restored know of no step
        return Failure(
            kind.cause, (rank,), "failed", self._step, known_committed, outcome.wall_seconds - began, restored=restored
        )

    def _train(self) -> None:
        """Save, train for an interval, save …"""
        size = self._world.step_seconds
        due = max(1, math.ceil(self._policy.interval_seconds / size - 1e-9))
        if self._step < 0:
            self._train_steps(1)
            self._save()
        while True:
            self._train_steps(due)
            while self._pending_save is not None:  # one at a time
                self._train_steps(max(1, math.ceil((self._pending_save[0] - self.outcome.wall_seconds) / size - 1e-9)))
            self._save()
            self._skip_ahead(max(due, math.ceil(self._world.durable_seconds / size - 1e-9)))

    def _skip_ahead(self, steps: int) -> None:
        """Right after a save: the same again and again (so many steps, and a save), as often as nothing else happens."""
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
        """Some steps, those first that were done before."""
        while count > 0:
            redone = min(count, max(0, self.outcome.best_step - self._step))
            stretch = redone or count
            broken = self._world.broken_step
            if broken is not None and self._step < broken <= self._step + stretch:
                stretch = broken - self._step - 1
                self._spend_steps(stretch, redone > 0)
                self._spend_at_risk("useful", self._world.step_seconds)
                self._last_failure = None
                raise _JobFailed
            self._spend_steps(stretch, redone > 0)
            count -= stretch

    def _spend_steps(self, count: int, is_redo: bool) -> None:
        began, size = self.outcome.wall_seconds, self._world.step_seconds
        try:
            self._spend_at_risk("redo" if is_redo else "useful", count * size)
            done = count
        except (_JobFailed, _SimulationEnded):
            done = min(count, int((self.outcome.wall_seconds - began) / size + 1e-9))
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
        """A spare takes the place of a host that was lost; without one, all wait for the repair."""
        if self._last_failure is None or not self._last_failure.kind.takes_host:
            return
        now = self.outcome.wall_seconds
        self._repair_times.append(now + self._world.repair_seconds)
        self._free_spares += sum(at <= now for at in self._repair_times)
        self._repair_times = [at for at in self._repair_times if at > now]
        if self._free_spares == 0:
            back = min(self._repair_times)
            self._spend("wait", back - now)
            self._repair_times.remove(back)
            self._free_spares += 1
        self._free_spares -= 1

    def _spend_at_risk(self, name: TimeCategory, seconds: float) -> None:
        """Spend time in which something may break."""
        now = self.outcome.wall_seconds
        while self._next_failure.at < now:  # while nothing ran, nothing broke
            self._next_failure = self._draw_failure(self._next_failure.at)
        failure = self._next_failure
        if failure.at >= now + seconds:
            self._spend(name, seconds)
            return
        self._spend(name, failure.at - now)
        self._last_failure, self._next_failure = failure, self._draw_failure(failure.at)
        raise _JobFailed

    def _spend(self, name: TimeCategory, seconds: float) -> None:
        """Time passes. Raises _End at the end of the days."""
        left = self._until - self.outcome.wall_seconds
        spent = min(seconds, left)
        self.outcome.seconds[name] += spent
        self.outcome.wall_seconds += spent
        if seconds >= left:
            self.outcome.wall_seconds = self._until
            raise _SimulationEnded

    def _draw_failure(self, moment: float) -> _FailureEvent:
        world, chance = self._world, self._random
        at = moment + chance.expovariate(1.0 / world.mtbf_seconds)
        kind = chance.choices(world.kinds, [each.share for each in world.kinds])[0]
        return _FailureEvent(at, kind, chance.randrange(world.hosts * world.ranks_per_host))


# --- many runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What one interval comes to, over several seeds."""

    interval_seconds: float
    daly: bool
    """It is the one that every="auto" takes."""
    goodputs: tuple[float, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def goodput(self) -> float:
        return fmean(self.goodputs)

    def mean(self, name: TimeCategory) -> float:
        """The share of the time that was spent on this."""
        return fmean(outcome.seconds[name] / outcome.wall_seconds for outcome in self.outcomes)


def sweep(world: World, days: float, seeds: int, intervals: Sequence[float] = ()) -> list[SweepPoint]:
    """Goodput by interval, each with the same failures; by default at Daly's interval, and around it.

    An interval shorter than a save takes comes to the same as one of that length: a save waits for the one before.
    """
    best = daly_policy(world).interval_seconds
    around = [best * factor for factor in _INTERVAL_FACTORS if best * factor >= world.durable_seconds]
    wanted = {*(intervals or around), best}
    points = []
    for interval in sorted(wanted):
        outcomes = tuple(simulate(world, Policy(interval), days, seed) for seed in range(seeds))
        points.append(SweepPoint(interval, interval == best, tuple(each.goodput for each in outcomes), outcomes))
    return points


_INTERVAL_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1 / 1.4, 1.4, 2, 4, 8, 16)


def total_seconds_by_category(outcomes: Sequence[Outcome]) -> Mapping[str, float]:
    """Seconds by name, over all."""
    return {name: sum(outcome.seconds[name] for outcome in outcomes) for name in TIME_CATEGORIES}
