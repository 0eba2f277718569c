"""Format a count with its noun for messages."""

from __future__ import annotations


def format_count(number: int, noun: str) -> str:
    """Return a count with its noun, such as `1 leaf` or `2 steps`."""
    plural = "leaves" if noun == "leaf" else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"
