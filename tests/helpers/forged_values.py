"""Values that differ from a given one in one part, as the metadata of a damaged or forged file do."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, -1, 1 << 70, 2.0, math.inf, "", "x", "\ud800", "\0", b"x", [], [None], {}, {"x": 1}, (), ("x", 1), (1 << 70, 0),
)  # fmt: skip
STRANGE_JSON = tuple(value for value in STRANGE if not isinstance(value, (bytes, tuple)))


def forgeries(value: Any, strange: tuple[Any, ...] = STRANGE) -> Iterator[Any]:
    """Yield copies of a value in which one part is replaced, left out or repeated; the value itself does not change."""
    yield from strange
    if isinstance(value, dict):
        yield from _forged_dicts(value, strange)
    elif isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        for i, item in enumerate(value):
            yield from (kind([*value[:i], forged, *value[i + 1 :]]) for forged in forgeries(item, strange))
            yield kind([*value[:i], *value[i + 1 :]])
            yield kind([*value[: i + 1], item, *value[i + 1 :]])
    elif hasattr(value, "__dict__") and not isinstance(value, (enum.Enum, type)):
        yield from _forged_objects(value, strange)


def _forged_dicts(value: dict[Any, Any], strange: tuple[Any, ...]) -> Iterator[dict[Any, Any]]:
    for key, item in value.items():
        others = {other: each for other, each in value.items() if other is not key}
        yield others
        yield from ({**value, key: forged} for forged in forgeries(item, strange))
        for forged in forgeries(key, strange) if not isinstance(key, str) else strange:
            try:
                yield {**others, forged: item}
            except (TypeError, AttributeError):  # it has no hash
                continue


def _forged_objects(value: Any, strange: tuple[Any, ...]) -> Iterator[Any]:
    for fields in _forged_dicts(vars(value), strange):
        if all(isinstance(name, str) for name in fields):
            made = object.__new__(type(value))
            made.__dict__.update(fields)
            yield made
