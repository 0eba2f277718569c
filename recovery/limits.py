"""How long a rank may say nothing. Of a step it is learned from how long steps took before; how long a load or a save takes
depends on where it goes and what is under way there, and says nothing of the next one. A pure calculation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

FIRST_SECONDS: Mapping[str, float] = {
    "start": 900.0, "load": 1800.0, "step": 900.0, "save": 1800.0, "eval": 3600.0, "compile": 3600.0, "end": inf,
}  # fmt: skip
"""Where nothing is learned. A first step may compile; after the last save the program does what it likes."""

_ENOUGH = 8
_KEPT = 256


@dataclass(slots=True)
class Limits:
    """Seconds of silence after which a rank is taken to hang."""

    factor: float = 30.0
    """Times what is usual; three times the longest that was seen in any case."""
    least_seconds: float = 10.0
    first_seconds: Mapping[str, float] = field(default_factory=lambda: FIRST_SECONDS)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def learn(self, phase: str, seconds: float) -> None:
        """It took so long from one beat to the next."""
        if phase == "step":
            self._steps.append(seconds)

    @property
    def floor(self) -> float:
        """No limit is below."""
        return min(self.least_seconds, *self.first_seconds.values())

    def usual_step(self) -> float:
        """What a step takes as a rule; one second where nothing is known."""
        return median(self._steps) if self._steps else 1.0

    def of(self, phase: str) -> float:
        """The limit of a phase."""
        first = self.first_seconds[phase]
        if phase != "step" or len(self._steps) < _ENOUGH:
            return first
        return max(self.least_seconds, min(first, max(self.factor * median(self._steps), 3 * max(self._steps))))
