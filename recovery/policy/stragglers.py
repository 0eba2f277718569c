"""Ranks that are slower than the others, step after step. Pure: who is one follows from how fast each rank was of late.

The time is looked at in quarters. A rank is a straggler where it was slow in each, by the mean of its steps and by the median:
a pause, a save or steps of very different length make none, and neither does what slows all ranks.

Where all ranks wait for each other in every step, their steps take equally long, and only what they mark by
`ckpt.pulse.compute` tells them apart. Where any rank marks it, nothing else counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from ckpt.training.heartbeat_page import RankHeartbeat

DEFAULT_FACTOR = 2.0
"""Who takes so many times as long as the median is a straggler, where nothing else is asked for."""

_QUARTER_COUNT = 4
_MIN_QUARTER_STEPS = 8
"""In each quarter, at least."""
_MIN_SLOWDOWN_SHARE = 0.1
"""Who holds up a step by less than this part of it is not worth a word."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """How fast a rank was of late."""

    rank: int
    seconds: float
    """For what counts of a step: the mean."""
    least_seconds: float
    """The same in the quarter in which it was fastest."""
    step_seconds: float
    """For a whole step."""
    marked: bool
    """What counts is what it has marked; otherwise the whole step."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    seconds: float
    usual_seconds: float
    """The median of all."""
    marked: bool

    @property
    def slowdown(self) -> float:
        """As long as the others."""
        return self.seconds / max(self.usual_seconds, 1e-9)

    def describe(self, host: str, window_seconds: float) -> str:
        """What it is, and since when."""
        where = f" on {host}" if host else ""
        what = "a step, without what it waits for" if self.marked else "a step"
        return (
            f"rank {self.rank}{where} takes {self.slowdown:.1f} times as long as the median "
            f"({_format_duration(self.seconds)} beside "
            f"{_format_duration(self.usual_seconds)} {what}) for {window_seconds:g} s or longer"
        )


def _format_duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(slots=True)
class _Quarter:
    began: float
    steps: int = 0
    compute_seconds: float = 0.0
    timed_steps: int = 0
    """Those that could be timed: no save, and nothing else, was before them."""
    timed_seconds: float = 0.0
    compute: list[float] = field(default_factory=list)
    """Of a step, each time that somebody looked; on the average, where several were done since."""
    timed: list[float] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return min(self.steps, self.timed_steps) >= _MIN_QUARTER_STEPS

    def fast_step_seconds(self, marked: bool) -> float:
        """A step, without those that took longer than others; not more than the mean, for there may be as many of both."""
        if marked:
            return min(self.compute_seconds / self.steps, median_low(self.compute))
        return min(self.timed_seconds / self.timed_steps, median_low(self.timed))


@dataclass(slots=True)
class PaceMeter:
    """The pace of one rank, from its beats. window_seconds: the time that is looked at; more, where steps are long."""

    rank: int
    window_seconds: float
    pace: RankPace | None = None
    """None as long as too little was seen."""
    _quarters: deque[_Quarter] = field(default_factory=lambda: deque(maxlen=_QUARTER_COUNT))
    _current: _Quarter | None = None

    def learn(self, before: RankHeartbeat, beat: RankHeartbeat) -> None:
        """Two beats that were seen one after the other. Others may have been between."""
        quarter, steps = self._current, beat.step - before.step
        if quarter is None:
            self._current = _Quarter(beat.since) if beat.phase == "step" else None  # the first step is not like the others
            return
        computed, took = beat.compute_seconds - before.compute_seconds, beat.since - before.since
        quarter.compute_seconds += computed
        if steps > 0:
            quarter.steps += steps
            quarter.compute.append(computed / steps)
            if before.phase == "step":
                quarter.timed_steps += steps
                quarter.timed_seconds += took
                quarter.timed.append(took / steps)
        if quarter.is_complete and beat.since - quarter.began >= self.window_seconds / _QUARTER_COUNT:
            self._quarters.append(quarter)
            self._current = _Quarter(beat.since)
            if len(self._quarters) == _QUARTER_COUNT:
                self.pace = _measure_pace(self.rank, self._quarters)


def _measure_pace(rank: int, quarters: Iterable[_Quarter]) -> RankPace:
    seen = list(quarters)
    marked = all(quarter.compute_seconds > 0 for quarter in seen)
    step = sum(quarter.timed_seconds for quarter in seen) / sum(quarter.timed_steps for quarter in seen)
    computed = sum(quarter.compute_seconds for quarter in seen) / sum(quarter.steps for quarter in seen)
    least = min(quarter.fast_step_seconds(marked) for quarter in seen)
    return RankPace(rank, computed if marked else step, least, step, marked)


def find_stragglers(paces: Iterable[RankPace], factor: float) -> list[Straggler]:
    """Those that take `factor` times as long as the median of all, the slowest first.

    The lower of two medians: of two ranks, and of two halves, the slower ones are stragglers.
    """
    comparable = list(paces)
    if any(pace.marked for pace in comparable):
        comparable = [pace for pace in comparable if pace.marked]
    if len(comparable) < 2:
        return []
    usual = median_low(pace.seconds for pace in comparable)
    least = _MIN_SLOWDOWN_SHARE * median_low(pace.step_seconds for pace in comparable)
    slow = [p for p in comparable if p.least_seconds >= factor * usual and p.least_seconds - usual >= least]
    return [Straggler(p.rank, p.seconds, usual, p.marked) for p in sorted(slow, key=lambda p: (-p.seconds, p.rank))]
