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

from ckpt.pulse import Beat

FACTOR = 2.0
"""Who takes so many times as long as the median is a straggler, where nothing else is asked for."""

_QUARTERS = 4
_STEPS = 8
"""In each quarter, at least."""
_SHARE = 0.1
"""Who holds up a step by less than this part of it is not worth a word."""


@dataclass(frozen=True, slots=True)
class Pace:
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
    def times(self) -> float:
        """As long as the others."""
        return self.seconds / max(self.usual_seconds, 1e-9)

    def in_words(self, host: str, window_seconds: float) -> str:
        """What it is, and since when."""
        where = f" on {host}" if host else ""
        what = "a step, without what it waits for" if self.marked else "a step"
        return (
            f"rank {self.rank}{where} takes {self.times:.1f} times as long as the median ({_short(self.seconds)} beside "
            f"{_short(self.usual_seconds)} {what}) for {window_seconds:g} s or longer"
        )


def _short(seconds: float) -> str:
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
    def is_whole(self) -> bool:
        return min(self.steps, self.timed_steps) >= _STEPS

    def fast(self, marked: bool) -> float:
        """A step, without those that took longer than others; not more than the mean, for there may be as many of both."""
        if marked:
            return min(self.compute_seconds / self.steps, median_low(self.compute))
        return min(self.timed_seconds / self.timed_steps, median_low(self.timed))


@dataclass(slots=True)
class Measure:
    """The pace of one rank, from its beats. window_seconds: the time that is looked at; more, where steps are long."""

    rank: int
    window_seconds: float
    pace: Pace | None = None
    """None as long as too little was seen."""
    _whole: deque[_Quarter] = field(default_factory=lambda: deque(maxlen=_QUARTERS))
    _now: _Quarter | None = None

    def learn(self, before: Beat, beat: Beat) -> None:
        """Two beats that were seen one after the other. Others may have been between."""
        now, steps = self._now, beat.step - before.step
        if now is None:
            self._now = _Quarter(beat.since) if beat.phase == "step" else None  # the first step is not like the others
            return
        computed, took = beat.compute_seconds - before.compute_seconds, beat.since - before.since
        now.compute_seconds += computed
        if steps > 0:
            now.steps += steps
            now.compute.append(computed / steps)
            if before.phase == "step":
                now.timed_steps += steps
                now.timed_seconds += took
                now.timed.append(took / steps)
        if now.is_whole and beat.since - now.began >= self.window_seconds / _QUARTERS:
            self._whole.append(now)
            self._now = _Quarter(beat.since)
            if len(self._whole) == _QUARTERS:
                self.pace = _pace(self.rank, self._whole)


def _pace(rank: int, quarters: Iterable[_Quarter]) -> Pace:
    seen = list(quarters)
    marked = all(quarter.compute_seconds > 0 for quarter in seen)
    step = sum(quarter.timed_seconds for quarter in seen) / sum(quarter.timed_steps for quarter in seen)
    computed = sum(quarter.compute_seconds for quarter in seen) / sum(quarter.steps for quarter in seen)
    least = min(quarter.fast(marked) for quarter in seen)
    return Pace(rank, computed if marked else step, least, step, marked)


def stragglers(paces: Iterable[Pace], factor: float) -> list[Straggler]:
    """Those that take `factor` times as long as the median of all, the slowest first.

    The lower of two medians: of two ranks, and of two halves, the slower ones are stragglers.
    """
    alike = list(paces)
    if any(pace.marked for pace in alike):
        alike = [pace for pace in alike if pace.marked]
    if len(alike) < 2:
        return []
    usual = median_low(pace.seconds for pace in alike)
    least = _SHARE * median_low(pace.step_seconds for pace in alike)
    slow = [p for p in alike if p.least_seconds >= factor * usual and p.least_seconds - usual >= least]
    return [Straggler(p.rank, p.seconds, usual, p.marked) for p in sorted(slow, key=lambda p: (-p.seconds, p.rank))]
