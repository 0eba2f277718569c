"""Chooses the interval between saves, from the cost of a save and the time between failures. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal

from ckpt.storage.base.errors import InvalidArgument

Every = int | timedelta | Literal["auto"] | None
"""How often to save: a number of steps, a time, the interval that loses the least time ("auto"), or only on request (None)."""

DEFAULT_MTBF_SECONDS = 3 * 3600.0
"""The mean time between failures if nothing better is known: "every few hours" on a large machine."""

MTBF_VARIABLE = "CKPT_MTBF"
"""The environment variable by which `ckpt-run` gives the ranks the mean seconds between two failures of this job."""


def daly_interval_seconds(cost_seconds: float, mtbf_seconds: float = DEFAULT_MTBF_SECONDS) -> float:
    """Return the seconds of work between two saves with which saves and failures together lose the least time.

    cost_seconds: how long a save stops the work.
    mtbf_seconds: the mean seconds between failures.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37.
    """
    m, d = mtbf_seconds, max(cost_seconds, 1e-3)
    if d >= 2 * m:
        return m
    r = math.sqrt(d / (2 * m))
    return math.sqrt(2 * d * m) * (1 + r / 3 + r * r / 9) - d


def posterior_mtbf_seconds(uptime_seconds: float, failures: int, prior_seconds: float = DEFAULT_MTBF_SECONDS) -> float:
    """Return the expected seconds between failures, from the observed failures and a prior.

    This is the mean rate of a Poisson process with a gamma prior of one failure in `prior_seconds`. From the second failure on,
    the observations outweigh the prior.
    """
    return (prior_seconds + uptime_seconds) / (1 + failures)


def mtbf_seconds_from_env(environ: Mapping[str, str] = os.environ) -> float:
    """Return the mean seconds between failures from the environment, or the default. Raises InvalidArgument."""
    text = environ.get(MTBF_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_MTBF_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgument(
            f"{MTBF_VARIABLE}={text!r} is not a number of seconds between two failures; unset it, or correct it"
        )
    return seconds


def interval_seconds(
    every: timedelta | Literal["auto"], cost_seconds: float, mtbf_seconds: float = DEFAULT_MTBF_SECONDS
) -> float:
    """Return the seconds between two saves, each of which stops the work for `cost_seconds`."""
    return every.total_seconds() if isinstance(every, timedelta) else daly_interval_seconds(cost_seconds, mtbf_seconds)


def reaches_multiple(step: int, step_before: int | None, every: int) -> bool:
    """Return whether a step is the first one at or after a multiple of `every` steps.

    step: the number of the step; number 99 is the 100th step.
    step_before: the step that was reported before it; None if that is unknown. It may be several numbers lower.
    """
    done = step + 1
    if step_before is None or step_before >= step:
        return done % every == 0
    return done // every > (step_before + 1) // every
