"""Format counts and lists of names for messages."""

from __future__ import annotations

from collections.abc import Sequence


def format_count(number: int, noun: str) -> str:
    """Return a count with its noun, such as `1 leaf` or `2 steps`."""
    plural = "leaves" if noun == "leaf" else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def first_few(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
