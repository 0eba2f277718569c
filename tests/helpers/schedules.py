"""All schedules of some actors with a bounded number of preemptions, kills and lost replies, one after another.

A fault of concurrent programs mostly needs few preemptions (CHESS: Musuvathi and Qadeer, PLDI 2007), so all schedules with few
of them are tried. A schedule is described by the decisions in which it differs from the simplest one, in which each actor runs
to its end. Schedules with few differences come first, so the first one that breaks a promise is a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from helpers.interleaving import Actor, Fate, Scheduler


@dataclass(frozen=True)
class Bounds:
    """The most that a schedule may have of each kind.

    preemptions: how often an actor stops while it could run on, and another one runs. kills: how many actors are killed.
    faults: how many calls have a fate other than `DONE`. A late call runs at any time, and stops once,
    without a preemption.
    """

    preemptions: int = 0
    kills: int = 0
    faults: int = 0


Differences = tuple[tuple[int, int], ...]
"""The numbers of the decisions that differ from the simplest ones, each with the option that is chosen."""


class Schedule(Scheduler):
    """One schedule. The actors begin in the order in which they were added."""

    def __init__(self, differences: Differences, bounds: Bounds) -> None:
        self._differences, self._left = dict(differences), bounds
        self.option_counts: list[int] = []
        """The number of options of each decision."""

    def next(self, living: Sequence[Actor], current: Actor | None, steps: list[str]) -> Actor:
        begun = [a for a in living if a.has_begun or a.is_late_call]
        others = [a for a in [*begun, *[a for a in living if a not in begun][:1]] if a is not current]
        if current is None or current not in living:
            return others[self._decide(len(others))]
        may_kill = self._left.kills > 0 and bool(others) and not current.is_late_call
        may_leave = self._left.preemptions > 0 or (current.is_late_call and not current.was_left)
        free = [a for a in others if a.is_late_call or may_leave]
        chosen = self._decide(1 + len(free) + len(others) * may_kill)
        if chosen == 0:
            return current
        if chosen <= len(free):
            follower = free[chosen - 1]
            if not follower.is_late_call and (current.was_left or not current.is_late_call):
                self._left = replace(self._left, preemptions=self._left.preemptions - 1)
            current.was_left = current.is_late_call
            return follower
        self._left = replace(self._left, kills=self._left.kills - 1)
        current.is_killed = True
        steps.append(f"{current.name} is killed")
        return others[chosen - 1 - len(free)]

    def fate(self, what: str) -> Fate:
        if not self._left.faults:
            return Fate.DONE
        fate = list(Fate)[self._decide(len(Fate))]
        if fate is not Fate.DONE:
            self._left = replace(self._left, faults=self._left.faults - 1)
        return fate

    def _decide(self, count: int) -> int:
        """Return the option of the next decision; 0 is the simplest."""
        chosen = self._differences.get(len(self.option_counts), 0)
        self.option_counts.append(count)
        return chosen


def run_all_schedules(run: Callable[[Schedule], None], bounds: Bounds) -> int:
    """Call `run` for each schedule within the bounds, and return their number. An error of `run` ends the search."""
    waiting: deque[Differences] = deque([()])
    count = 0
    while waiting:
        differences = waiting.popleft()
        schedule = Schedule(differences, bounds)
        run(schedule)
        count += 1
        first = differences[-1][0] + 1 if differences else 0
        waiting.extend(
            (*differences, (at, option))
            for at in range(first, len(schedule.option_counts))
            for option in range(1, schedule.option_counts[at])
        )
    return count
