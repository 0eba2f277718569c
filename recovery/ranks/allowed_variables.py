"""Filters the environment variables that an entry of the run log sets in the ranks.

A variable such as LD_PRELOAD, PATH or PYTHONSTARTUP makes a process run other code. So only the variables that ckpt-run itself
writes into a `start` entry are passed on. Somebody who can write the log can set no others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ckpt.training import loss_spikes
from ckpt.training.batch_order import SKIP_VARIABLE
from ckpt.training.restore_step_limit import RESTORE_STEP_LIMIT_VARIABLE
from ckpt.training.save_interval import MTBF_VARIABLE

log = logging.getLogger("ckpt.run")

ALLOWED_VARIABLES = frozenset({SKIP_VARIABLE, RESTORE_STEP_LIMIT_VARIABLE, loss_spikes.LIMIT_VARIABLE, MTBF_VARIABLE})
"""The variables that an entry may set. All are read by ckpt alone."""

_MOST_CHARACTERS = 100_000
_WRITERS_ADVICE = "find out who else can write the run log"


def allowed_environment(given: object) -> dict[str, str]:
    """Return the allowed variables of a `start` entry. The others are dropped, and a warning names them."""
    if not isinstance(given, Mapping):
        log.warning(
            "the run log gives the ranks an environment that is a %s, which is ignored; " + _WRITERS_ADVICE,
            type(given).__name__,
        )
        return {}
    accepted = {name: value for name, value in given.items() if name in ALLOWED_VARIABLES and _is_usable(value)}
    if dropped := sorted(map(repr, given.keys() - accepted.keys())):
        log.warning(
            "the run log gives the ranks %s, which ckpt-run never sets; they are dropped; " + _WRITERS_ADVICE,
            ", ".join(dropped)[:500],
        )
    return accepted


def _is_usable(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= _MOST_CHARACTERS
