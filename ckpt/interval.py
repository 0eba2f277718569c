"""How often to save. Pure."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Literal

Every = int | timedelta | Literal["auto"] | None
"""How often to save: a number of steps, a time, the interval that loses the least, or only when asked."""

MEAN_TIME_TO_FAILURE = 3 * 3600.0
"""Seconds between failures where nothing better is known: "every few hours" on a large machine."""


def daly(cost_seconds: float, mean_time_to_failure: float = MEAN_TIME_TO_FAILURE) -> float:
    """Seconds of work between two saves that loses the least time in all, for saves that stop the work for so long.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37.
    """
    m, d = mean_time_to_failure, max(cost_seconds, 1e-3)
    if d >= 2 * m:
        return m
    r = math.sqrt(d / (2 * m))
    return math.sqrt(2 * d * m) * (1 + r / 3 + r * r / 9) - d


def interval_seconds(every: timedelta | Literal["auto"], cost_seconds: float) -> float:
    """Seconds between two saves of this cost."""
    return every.total_seconds() if isinstance(every, timedelta) else daly(cost_seconds)
