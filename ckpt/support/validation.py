"""What a user gives as an option, checked at once: a wrong one is refused in one line, before anything is read or written.

A wrong type would otherwise be told by whatever meets it first, perhaps in a thread of the background, hours later.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np

from ckpt.storage.base.errors import InvalidArgument


def checked_positive(name: str, value: Any, what: str) -> int:
    """A whole number of at least 1, numpy's too. `what` says what is taken, for the message."""
    number = as_integer(value)
    if number is None or number < 1:
        raise InvalidArgument(f"{name}={value!r}: use {what}")
    return number


def checked_every(value: Any) -> Any:
    """How often to save."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, timedelta) and value >= timedelta(0):
        return value
    return checked_positive("every", value, "a positive number of steps, a timedelta, 'auto' or None")


def checked_bytes(name: str, value: Any) -> int | None:
    """A limit in bytes, or None."""
    return None if value is None else checked_positive(name, value, "a positive number of bytes, as in 4 << 30, or None")


def checked_seconds(name: str, value: Any) -> float:
    """A time to wait; it may be infinite."""
    try:
        seconds = 0.0 if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise InvalidArgument(f"{name}={value!r}: use a positive number of seconds")
    return seconds


def checked_patterns(value: Any) -> tuple[str, ...] | None:
    """Names and patterns of leaves; an iterator is used up here."""
    if value is None:
        return None
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not found or not all(isinstance(pattern, str) for pattern in found):
        raise InvalidArgument(f"only={value!r}: use a name or pattern such as 'model.*', or a list of them")
    return found


def check_rename(value: Any) -> None:
    """A function, or regular expressions and their replacements."""
    if value is None or callable(value):
        return
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"rename={value!r}: use a function, or {{regular expression: replacement}}")
    for pattern, replacement in value.items():
        try:
            compiled = re.compile(pattern)
            if not callable(replacement):
                compiled.sub(replacement, "")
        except (re.error, TypeError, IndexError) as error:
            raise InvalidArgument(
                f"rename={{{pattern!r}: {replacement!r}}}: no regular expression and its replacement: {error}"
            ) from error


def check_progress(value: Any) -> None:
    """What is told the number of bytes just read."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"progress={value!r}: use a function of one number, the bytes just read, or None")


def check_switch(name: str, value: Any) -> None:
    """True or False, numpy's too. Nothing else: "false" from a configuration would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name}={value!r}: use True or False")


def check_share_reads(value: Any) -> None:
    """Whether ranks read for each other."""
    if not (isinstance(value, bool) or (isinstance(value, str) and value == "auto")):
        raise InvalidArgument(f"share_reads={value!r}: use 'auto', True or False")


def as_integer(value: Any) -> int | None:
    """A whole number as int, None for anything else; True and False are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
