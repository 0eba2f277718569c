"""The class SpikeDetector, which finds a loss that jumps far above the losses before it."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping

from ckpt.storage.base.errors import InvalidArgument

FACTOR_VARIABLE, LIMIT_VARIABLE = "CKPT_SPIKE", "CKPT_SPIKE_LIMIT"
"""The environment variables by which `ckpt-run --spike` turns detection on. The limit applies until there are enough losses."""

_WINDOW = 64
_MIN_LOSSES = 16
_MIN_SPREAD_RATIO = 0.01
"""The least spread as a share of the median, so that small changes of an almost constant loss are not spikes."""


class SpikeDetector:
    """Finds spikes in a sequence of losses.

    factor: a spike is this many spreads above the median of the last 64 losses. The spread is the interquartile range, scaled
        to the standard deviation of a normal distribution. So a few outliers change neither. Good values are 6 to 20.
    limit: a loss above it is a spike while there are fewer than 16 losses.
    """

    def __init__(self, factor: float, limit: float = math.inf) -> None:
        if not factor > 0:
            raise InvalidArgument(f"{factor} is not a factor by which a loss may jump; give a positive number, such as 10")
        self._factor = factor
        self._first_limit = limit
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def limit(self) -> float:
        """Return the largest value of the next loss that is not a spike: infinity while most losses are exactly 0."""
        found = self._sorted
        count = len(found)
        if count < _MIN_LOSSES:
            return self._first_limit
        middle = found[count // 2]
        spread = (found[3 * count // 4] - found[count // 4]) / 1.349
        spread = max(spread, _MIN_SPREAD_RATIO * abs(middle))
        return middle + self._factor * spread if spread else math.inf

    def observe(self, loss: float) -> bool:
        """Return whether this finite loss is a spike; add it to the window if not. Takes a few microseconds."""
        if loss > self.limit():
            return True
        recent, found = self._recent, self._sorted
        if len(recent) == _WINDOW:
            del found[bisect_left(found, recent.popleft())]
        recent.append(loss)
        insort(found, loss)
        return False


def spike_detector_from_env(environ: Mapping[str, str] = os.environ) -> SpikeDetector | None:
    """Return the detector that the environment describes, or None if detection is off. Raises InvalidArgument."""
    if not (factor := environ.get(FACTOR_VARIABLE)):
        return None
    try:
        return SpikeDetector(float(factor), float(environ.get(LIMIT_VARIABLE, "inf")))
    except ValueError as error:
        raise InvalidArgument(f"{FACTOR_VARIABLE} and {LIMIT_VARIABLE} must be numbers: {error}") from error
