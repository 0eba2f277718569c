"""The number below which a job restores a step after a roll-back, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpt.storage.base.errors import InvalidArgument

RESTORE_STEP_LIMIT_VARIABLE = "CKPT_BEFORE"
"""The environment variable by which `ckpt-run` makes a job restore a step below a number, because later steps may be bad."""


def restore_step_limit_from_env(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number below which to restore, from the environment; None to restore the newest step.

    Raises InvalidArgument if it is not a number.
    """
    if not (text := environ.get(RESTORE_STEP_LIMIT_VARIABLE)):
        return None
    if not text.isdecimal():
        raise InvalidArgument(
            f"{RESTORE_STEP_LIMIT_VARIABLE}={text!r} is not a step; unset it, or give the number below which to restore"
        )
    return int(text)
