"""Describes where a training run under `ckpt-run --adapt` starts."""

from __future__ import annotations

import ckpt


def describe_start(url: str) -> str:
    """Return the newest step of a repository, from which a training run continues, in words."""
    try:
        found = ckpt.open(url).latest()
    except ckpt.StepNotFound:
        found = None
    return "starts anew" if found is None else f"continues from step {found.step}"
