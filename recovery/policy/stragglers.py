"""Finds stragglers: ranks that are slower than the others, step after step, by their recent pace. Pure.

A time window is split into quarters. A rank is a straggler if it was slow in each quarter, by the mean and by the median of
its steps. So a pause, a save or steps of very different lengths make no straggler, and neither does a slowdown of all ranks.

If all ranks wait for each other in every step, their steps take equally long. Then only the time that they mark by
`ckpt.pulse.compute` differs. As soon as one rank marks it, only marked time counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low

from ckpt.training.heartbeat_records import RankHeartbeat

DEFAULT_FACTOR = 2.0
"""A rank that takes this many times as long as the median is a straggler, unless an option sets another factor."""

_QUARTER_COUNT = 4
_MIN_QUARTER_STEPS = 8
"""The fewest steps of a quarter."""
_MIN_SLOWDOWN_SHARE = 0.1
"""A rank that delays a step by less than this share of it is not reported."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """How fast a rank was in the recent time window."""

    rank: int
    seconds: float
    """The mean duration of the part of a step that counts."""
    least_seconds: float
    """The same in the fastest quarter of the window."""
    step_seconds: float
    """The mean duration of a whole step."""
    marked: bool
    """Whether only the part that the rank marked by `ckpt.pulse.compute` counts; otherwise the whole step counts."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    seconds: float
    usual_seconds: float
    """The median of all ranks."""
    marked: bool

    @property
    def slowdown(self) -> float:
        """How many times as long as the median the rank takes."""
        return self.seconds / max(self.usual_seconds, 1e-9)

    def describe(self, host: str, window_seconds: float) -> str:
        """Return a text: which rank is slow, how slow, and for how long."""
        where = f" on {host}" if host else ""
        unit = "a step, without what it waits for" if self.marked else "a step"
        return (
            f"rank {self.rank}{where} takes {self.slowdown:.1f} times as long as the median ({_format_duration(self.seconds)} "
            f"instead of {_format_duration(self.usual_seconds)} {unit}) for {window_seconds:g} s or longer"
        )


def _format_duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(slots=True)
class _Quarter:
    began: float
    steps: int = 0
    compute_seconds: float = 0.0
    timed_steps: int = 0
    """Steps whose duration is known: no save and no other phase came directly before them."""
    timed_seconds: float = 0.0
    compute: list[float] = field(default_factory=list)
    """Marked seconds per step, one value per observed heartbeat: the average if several steps were done since the last."""
    timed: list[float] = field(default_factory=list)
    """Seconds per timed step, in the same way."""

    @property
    def is_complete(self) -> bool:
        return min(self.steps, self.timed_steps) >= _MIN_QUARTER_STEPS

    def fast_step_seconds(self, marked: bool) -> float:
        """Return the duration of a typical fast step.

        The low median leaves out slow steps. The mean is an upper bound, because half of the steps may be slow.
        """
        if marked:
            return min(self.compute_seconds / self.steps, median_low(self.compute))
        return min(self.timed_seconds / self.timed_steps, median_low(self.timed))


@dataclass(slots=True)
class PaceMeter:
    """Measures the pace of one rank from its heartbeats.

    window_seconds: the length of the time window. It is longer if steps are long.
    """

    rank: int
    window_seconds: float
    pace: RankPace | None = None
    """None until enough steps were observed."""
    _quarters: deque[_Quarter] = field(default_factory=lambda: deque(maxlen=_QUARTER_COUNT))
    _current: _Quarter | None = None

    def learn(self, before: RankHeartbeat, beat: RankHeartbeat) -> None:
        """Add two heartbeats that were observed in this order. Other heartbeats may lie between them."""
        quarter, steps = self._current, beat.step - before.step
        if quarter is None:
            self._current = _Quarter(beat.since) if beat.phase == "step" else None  # leave out the first step: it is slower
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
    window = list(quarters)
    marked = all(quarter.compute_seconds > 0 for quarter in window)
    step = sum(quarter.timed_seconds for quarter in window) / sum(quarter.timed_steps for quarter in window)
    computed = sum(quarter.compute_seconds for quarter in window) / sum(quarter.steps for quarter in window)
    least = min(quarter.fast_step_seconds(marked) for quarter in window)
    return RankPace(rank, computed if marked else step, least, step, marked)


def find_stragglers(paces: Iterable[RankPace], factor: float) -> list[Straggler]:
    """Return the ranks that take at least `factor` times as long as the median of all ranks, the slowest first.

    The median is the lower one of an even number: of two ranks, or of two halves, the slower ones are stragglers.
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
