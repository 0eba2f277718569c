"""Warnings that name the user's line, whatever lies between it and the code of this package that warns."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_WRAPPERS = ("contextlib", "functools", "threading")
"""Modules whose frames lie between frames of this package, as those of decorators do, or at the bottom of its threads."""


def warn_user(message: str) -> None:
    """Issue a UserWarning for the first frame outside of this package; for the caller in a thread of this package."""
    warnings.warn(message, stacklevel=_user_stack_level(sys._getframe(1)))


def _user_stack_level(caller: FrameType) -> int:
    """Return the `stacklevel` for a call of warnings.warn by a function that `caller` called."""
    level, frame = 2, caller
    while frame.f_globals.get("__name__", "").partition(".")[0] in (_PACKAGE, *_WRAPPERS):
        if frame.f_back is None:
            return 2
        level, frame = level + 1, frame.f_back
    return level
