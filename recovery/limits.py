"""How long a rank may say nothing, learned for each phase from how long it took before. Steps are much alike. How long a load
or a save takes depends on where it goes and what is under way there, so that all but steps are given far more time. A pure
calculation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

FIRST_SECONDS: Mapping[str, float] = {
    "start": 3600.0, "load": 1800.0, "step": 900.0, "save": 1800.0, "eval": 3600.0, "compile": 3600.0, "end": inf,
}  # fmt: skip
"""Where nothing is learned. A start builds the model, a first step may compile; after the last save the program does what it
likes."""

_LEARNED = ("step", "save", "load", "eval", "compile")

_ENOUGH = 8
_KEPT = 256


def first_seconds(seconds: float) -> Mapping[str, float]:
    """The same for all phases, where nothing is learned; but for what comes after the last save."""
    return {phase: inf if phase == "end" else seconds for phase in FIRST_SECONDS}


def _none_seen() -> Mapping[str, deque[float]]:
    return {phase: deque(maxlen=_KEPT) for phase in _LEARNED}


@dataclass(slots=True)
class Limits:
    """Seconds of silence after which a rank is taken to hang."""

    factor: float = 30.0
    """Times what is usual; three times the longest that was seen in any case."""
    least_seconds: float = 10.0
    """Of a step. Other phases are given `factor` times as long at least."""
    first_seconds: Mapping[str, float] = field(default_factory=lambda: FIRST_SECONDS)
    """Where nothing is learned, and never more than that."""
    _seen: Mapping[str, deque[float]] = field(default_factory=_none_seen)

    def learn(self, phase: str, seconds: float) -> None:
        """It took so long from one beat to the next."""
        if phase in self._seen:
            self._seen[phase].append(seconds)

    def cut_off(self, phase: str, seconds: float) -> None:
        """A rank was taken to hang after so long. Where that was wrong, all but a step have more time at the next start."""
        if phase != "step":
            self.learn(phase, seconds)

    @property
    def floor(self) -> float:
        """No limit is below."""
        return min(self.least_seconds, *self.first_seconds.values())

    def usual_step(self) -> float:
        """What a step takes as a rule; one second where nothing is known."""
        return median(self._seen["step"]) if self._seen["step"] else 1.0

    def of(self, phase: str) -> float:
        """The limit of a phase."""
        first, seen = self.first_seconds[phase], self._seen.get(phase, ())
        if len(seen) < _ENOUGH:
            return first
        least = self.least_seconds if phase == "step" else self.factor * self.least_seconds
        return max(self.least_seconds, min(first, max(least, self.factor * median(seen), 3 * max(seen))))
