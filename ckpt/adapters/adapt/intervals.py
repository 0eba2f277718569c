"""How often `ckpt-run --adapt` saves where neither the script nor its framework sets an interval."""

from __future__ import annotations

import os

from ckpt.adapters.adapt.startup.hooks import EVERY_VARIABLE
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training.save_interval import Every


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
