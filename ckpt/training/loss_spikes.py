"""Whether a loss has jumped: by the median and the spread of those before it. Pure."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping

from ckpt.storage.base.errors import InvalidArgument

FACTOR_VARIABLE, LIMIT_VARIABLE = "CKPT_SPIKE", "CKPT_SPIKE_LIMIT"
"""The environment variables by which `ckpt-run` asks for it; the second holds until enough was seen, as after a restart."""

_WINDOW = 64
_MIN_LOSSES = 16
_MIN_SPREAD_RATIO = 0.01
"""Of the median: a loss that hardly moves may do so by this."""


class SpikeDetector:
    """Looks at one loss after another.

    factor: a spike is so many times the spread above the median of the last 64 losses. The spread is that of the middle
        half, in units of a normal distribution's standard deviation: a few outliers change neither. Good values are 6 to 20.
    limit: what is too much as long as fewer than 16 losses were seen.
    """

    def __init__(self, factor: float, limit: float = math.inf) -> None:
        if not factor > 0:
            raise InvalidArgument(f"{factor} is no factor by which a loss may jump; give a positive number, such as 10")
        self._factor = factor
        self._first_limit = limit
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def limit(self) -> float:
        """What the next loss must not be above."""
        found = self._sorted
        count = len(found)
        if count < _MIN_LOSSES:
            return self._first_limit
        middle = found[count // 2]
        spread = (found[3 * count // 4] - found[count // 4]) / 1.349
        return middle + self._factor * max(spread, _MIN_SPREAD_RATIO * abs(middle))

    def observe(self, loss: float) -> bool:
        """Whether this finite loss is a spike; else it is learned from. A few microseconds."""
        if loss > self.limit():
            return True
        recent, found = self._recent, self._sorted
        if len(recent) == _WINDOW:
            del found[bisect_left(found, recent.popleft())]
        recent.append(loss)
        insort(found, loss)
        return False


def spike_detector_from_env(environ: Mapping[str, str] = os.environ) -> SpikeDetector | None:
    """What the environment says; None where nothing is looked for."""
    if not (factor := environ.get(FACTOR_VARIABLE)):
        return None
    try:
        return SpikeDetector(float(factor), float(environ.get(LIMIT_VARIABLE, "inf")))
    except ValueError as error:
        raise InvalidArgument(f"{FACTOR_VARIABLE} and {LIMIT_VARIABLE} must be numbers: {error}") from error
