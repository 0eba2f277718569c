"""A check of the message of an error."""

from __future__ import annotations

from typing import Any


def one_line(error: BaseException | pytest_info, *words: str) -> str:
    """Return the message of an error, and check that it is one line that contains all `words`."""
    text = str(getattr(error, "value", error))
    assert "\n" not in text, text
    assert len(text) > 20, text
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
    return text


pytest_info = Any
