"""How often `ckpt-run --adapt` saves and how many steps it keeps, where neither script nor framework has a setting."""

from __future__ import annotations

import os

from ckpt.adapters.adapt.startup.hooks import EVERY_VARIABLE
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training.save_interval import Every

KEEP = 3
"""How many steps are kept."""


def interval_from_env() -> Every:
    """Return the number of steps in CKPT_ADAPT_EVERY, or "auto". Raises InvalidArgument for anything else."""
    text = os.environ.get(EVERY_VARIABLE) or "auto"
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and int(text)):
        raise InvalidArgument(f"{EVERY_VARIABLE}={text!r}: give a number of steps, or unset it")
    return int(text)


def describe(every: Every) -> str:
    """Return an interval in words."""
    return "at the interval that loses the least time" if every == "auto" else f"every {every} steps"
