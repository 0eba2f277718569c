"""Words of messages that all parts use."""

from __future__ import annotations


def format_count(number: int, noun: str) -> str:
    """`1 leaf`, `2 steps`."""
    plural = "leaves" if noun == "leaf" else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"
