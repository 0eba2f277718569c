"""Validate the options that a user gives, before anything is read or written, with an error of one line.

A wrong type would otherwise raise an error where it is first used, perhaps hours later in a background thread.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

import numpy as np

from ckpt.storage.base.errors import InvalidArgument


def checked_positive(name: str, value: object, what: str) -> int:
    """Return a whole number of at least 1 as int, also one of numpy. what: the allowed values. Raises InvalidArgument."""
    return _checked_integer(name, value, 1, what)


def checked_not_negative(name: str, value: object, what: str) -> int:
    """Return a whole number of at least 0 as int, also one of numpy. what: the allowed values. Raises InvalidArgument."""
    return _checked_integer(name, value, 0, what)


def _checked_integer(name: str, value: object, least: int, what: str) -> int:
    number = as_integer(value)
    if number is None or number < least:
        raise InvalidArgument(f"{name}={value!r}: use {what}")
    return number


def checked_every(value: object) -> int | timedelta | Literal["auto"] | None:
    """Return the option `every`, the interval between saves. Raises InvalidArgument if it is not valid."""
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    if isinstance(value, timedelta) and value >= timedelta(0):
        return value
    return checked_positive("every", value, "a positive number of steps, a timedelta, 'auto' or None")


def checked_bytes(name: str, value: object) -> int | None:
    """Return a limit in bytes, or None. Raises InvalidArgument if it is not a positive whole number."""
    return None if value is None else checked_positive(name, value, "a positive number of bytes, as in 4 << 30, or None")


def checked_seconds(name: str, value: Any) -> float:
    """Return a time to wait in seconds, which may be infinite. Raises InvalidArgument if it is not positive."""
    try:
        seconds = 0.0 if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not seconds > 0:
        raise InvalidArgument(f"{name}={value!r}: use a positive number of seconds")
    return seconds


def checked_patterns(value: object) -> tuple[str, ...] | None:
    """Return the option `only`, names and patterns of leaves, as a tuple; None for no selection. Raises InvalidArgument."""
    if value is None:
        return None
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not found or not all(isinstance(pattern, str) for pattern in found):
        raise InvalidArgument(f"only={value!r}: use a name or pattern such as 'model.*', or a list of them")
    return found


def check_rename(value: object) -> None:
    """Raise InvalidArgument unless `rename` is None, a function, or a mapping from regular expressions to replacements."""
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
                f"rename={{{pattern!r}: {replacement!r}}}: not a regular expression and its replacement ({error}); write "
                "them as for re.sub"
            ) from error


def check_progress(value: object) -> None:
    """Raise InvalidArgument unless `progress` is None or a function."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"progress={value!r}: use a function of one number, the bytes just read, or None")


def check_function(name: str, value: object, what: str) -> None:
    """Raise InvalidArgument unless the value is a function. what: its arguments and what it returns."""
    if not callable(value):
        raise InvalidArgument(f"{name}={value!r:.80}: use a function of {what}")


def check_choice(name: str, value: object, *choices: str) -> None:
    """Raise InvalidArgument unless the value is one of the choices."""
    if not (isinstance(value, str) and value in choices):
        raise InvalidArgument(f"{name}={value!r}: use {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")


def check_switch(name: str, value: object) -> None:
    """Raise InvalidArgument unless the value is True or False, also of numpy; the text "false" would count as True."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name}={value!r}: use True or False")


def check_share_reads(value: object) -> None:
    """Raise InvalidArgument unless `share_reads` is "auto", True or False."""
    if not (isinstance(value, bool) or (isinstance(value, str) and value == "auto")):
        raise InvalidArgument(f"share_reads={value!r}: use 'auto', True or False")


def as_integer(value: Any) -> int | None:
    """Return a whole number as int, None for anything else, including True and False."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
