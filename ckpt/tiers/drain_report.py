"""The record DrainReport, the result of a drain of memory tiers, and the line about a copied step, by which logs are read."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COPY_LINE = re.compile(r"^step \d+ was brought from ", re.MULTILINE)
"""The beginning of a line that `copied_step_line` has made. The other lines of a report begin with a URL."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain has done. Callers decide by the flags; the text is for people, and for the log of the run."""

    text: str = ""
    """One line for each repository; "" if no step was only in memory."""
    has_copied: bool = False
    """Whether a step that was only in memory was copied."""
    has_failed: bool = False
    """Whether steps may be only in memory, so that the memory must be kept."""
    newest_step: int = -1
    """The newest step that the memories had; -1 none."""
    unread: tuple[str, ...] = ()
    """The memories that could not be read, and count as lost because another one was read."""


def copied_step_line(step: int, source: str, target: str) -> str:
    """Return the line of a report about a step that was copied between two URLs."""
    return f"step {step} was brought from {source} to {target}"


def has_copied_step_line(text: str) -> bool:
    """Return whether a text in the log of a run, which another host may have written, has a line about a copied step."""
    return _COPY_LINE.search(text) is not None
