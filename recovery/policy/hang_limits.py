"""How long a rank may say nothing, learned for each phase from how long it took before. Steps are much alike. How long a load
or a save takes depends on where it goes and what is under way there, so that all but steps are given far more time. A pure
calculation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

INITIAL_LIMIT_SECONDS: Mapping[str, float] = {
    "start": 3600.0, "load": 1800.0, "step": 900.0, "save": 1800.0, "eval": 3600.0, "compile": 3600.0, "end": inf,
}  # fmt: skip
"""Where nothing is learned. A start builds the model, a first step may compile; after the last save the program does what it
likes."""

_LEARNED_PHASES = ("step", "save", "load", "eval", "compile")

_ENOUGH_SAMPLES = 8
_KEPT_SAMPLES = 256


def uniform_initial_limits(seconds: float) -> Mapping[str, float]:
    """The same for all phases, where nothing is learned; but for what comes after the last save."""
    return {phase: inf if phase == "end" else seconds for phase in INITIAL_LIMIT_SECONDS}


def _no_samples() -> Mapping[str, deque[float]]:
    return {phase: deque(maxlen=_KEPT_SAMPLES) for phase in _LEARNED_PHASES}


@dataclass(slots=True)
class HangLimits:
    """Seconds of silence after which a rank is taken to hang."""

    factor: float = 30.0
    """Times what is usual; three times the longest that was seen in any case."""
    least_seconds: float = 10.0
    """Of a step. Other phases are given `factor` times as long at least."""
    initial_limit_seconds: Mapping[str, float] = field(default_factory=lambda: INITIAL_LIMIT_SECONDS)
    """Where nothing is learned, and never more than that."""
    _samples: Mapping[str, deque[float]] = field(default_factory=_no_samples)

    def learn(self, phase: str, seconds: float) -> None:
        """It took so long from one beat to the next."""
        if phase in self._samples:
            self._samples[phase].append(seconds)

    def learn_hang(self, phase: str, seconds: float) -> None:
        """A rank was taken to hang after so long. Where that was wrong, all but a step have more time at the next start."""
        if phase != "step":
            self.learn(phase, seconds)

    @property
    def floor_seconds(self) -> float:
        """No limit is below."""
        return min(self.least_seconds, *self.initial_limit_seconds.values())

    def usual_step_seconds(self) -> float:
        """What a step takes as a rule; one second where nothing is known."""
        return median(self._samples["step"]) if self._samples["step"] else 1.0

    def limit_seconds(self, phase: str) -> float:
        """The limit of a phase."""
        first, seen = self.initial_limit_seconds[phase], self._samples.get(phase, ())
        if len(seen) < _ENOUGH_SAMPLES:
            return first
        least = self.least_seconds if phase == "step" else self.factor * self.least_seconds
        return max(self.least_seconds, min(first, max(least, self.factor * median(seen), 3 * max(seen))))
