"""How long a rank may send no heartbeat before it counts as hung: a limit learned for each phase. Pure.

Steps take nearly equal times. How long a load or a save takes depends on the storage and on its other load, so all phases
except `step` have far longer limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

INITIAL_LIMIT_SECONDS: Mapping[str, float] = {
    "start": 3600.0, "load": 1800.0, "step": 900.0, "save": 1800.0, "eval": 3600.0, "compile": 3600.0, "end": inf,
}  # fmt: skip
"""Limits before enough durations are known. `start` includes building the model, and a first step may compile. `end` has no
limit: after the last save a program may do anything."""

USUAL_FACTOR = 30.0
"""The limit as a multiple of the median duration."""

_LEARNED_PHASES = ("step", "save", "load", "eval", "compile")

_ENOUGH_SAMPLES = 8
_KEPT_SAMPLES = 256


def default_initial_limits(least_seconds: float) -> Mapping[str, float]:
    """Return the initial limits where the user gives none: no limit is below the shortest one of its phase.

    least_seconds: the shortest limit of a step.
    """
    return {phase: max(seconds, _least_seconds(phase, least_seconds)) for phase, seconds in INITIAL_LIMIT_SECONDS.items()}


def _least_seconds(phase: str, of_step: float, factor: float = USUAL_FACTOR) -> float:
    return of_step if phase in ("start", "step") else factor * of_step


def uniform_initial_limits(seconds: float) -> Mapping[str, float]:
    """Return the same initial limit for all phases except `end`, which has none."""
    return {phase: inf if phase == "end" else seconds for phase in INITIAL_LIMIT_SECONDS}


def _no_samples() -> Mapping[str, deque[float]]:
    return {phase: deque(maxlen=_KEPT_SAMPLES) for phase in _LEARNED_PHASES}


@dataclass(slots=True)
class HangLimits:
    """Seconds without a heartbeat after which a rank counts as hung."""

    factor: float = USUAL_FACTOR
    """The limit as a multiple of the median duration. The limit is also at least three times the longest duration so far."""
    least_seconds: float = 10.0
    """The shortest limit of a step. That of the other phases is `factor` times as long."""
    initial_limit_seconds: Mapping[str, float] = field(default_factory=lambda: INITIAL_LIMIT_SECONDS)
    """Limits before enough durations are known. A learned limit is never longer."""
    _samples: Mapping[str, deque[float]] = field(default_factory=_no_samples)
    """The newest durations of each phase."""
    _longest: dict[str, float] = field(default_factory=dict)
    """The longest duration of each phase so far. It never becomes shorter: an evaluation may come after any number of steps."""

    def learn(self, phase: str, seconds: float) -> None:
        """Record the time from one heartbeat to the next."""
        if phase in self._samples:
            self._samples[phase].append(seconds)
            self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))

    def learn_hang(self, phase: str, seconds: float) -> None:
        """Record that a rank counted as hung after this time.

        All phases with a learned limit, except `step`, learn it: a rank that was only slow has more time in the next attempt.
        """
        if phase != "step":
            self.learn(phase, seconds)

    @property
    def floor_seconds(self) -> float:
        """The shortest of all limits."""
        return min(self.least_seconds, *self.initial_limit_seconds.values())

    def usual_step_seconds(self) -> float:
        """Return the median duration of a step; one second before the first."""
        return median(self._samples["step"]) if self._samples["step"] else 1.0

    def limit_seconds(self, phase: str) -> float:
        """Return the limit of a phase."""
        initial, samples = self.initial_limit_seconds[phase], self._samples.get(phase, ())
        if len(samples) < _ENOUGH_SAMPLES:
            return initial
        least = _least_seconds(phase, self.least_seconds, self.factor)
        return max(self.least_seconds, min(initial, max(least, self.factor * median(samples), 3 * self._longest[phase])))
