"""The types of values in the TOML file of namespaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckpt.storage.base.errors import InvalidArgument


def require_string(table: Mapping[str, Any], key: str, source: str, default: str | None = None) -> str:
    """Return the value of a key; raise InvalidArgument unless it is a string.

    source: the file and the table, for messages. default: the value of a missing key; None where it must not be missing.
    """
    value = table.get(key, default)
    if not isinstance(value, str):
        found = repr(value) if key in table else "missing"
        raise InvalidArgument(f"{source}: {key} is {found}; write a string in quotes")
    return value


def number_or_nan(value: object) -> float:
    """Return a value as a number; NaN, which is in no range, if it is not a number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
