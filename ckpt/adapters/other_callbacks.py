"""What the other callbacks of a `fit` count, which a callback of ckpt saves with the training."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np


class OtherCallbacks:
    """What callbacks such as EarlyStopping, ReduceLROnPlateau and History have counted since the start of a fit."""

    def __init__(self, callbacks: Iterable[object], skipped: Collection[str] = (), no_state: Collection[str] = ()) -> None:
        """skipped: names of classes without a state. no_state: names of attributes that do not belong to the state."""
        self._no_state = no_state
        self._callbacks: dict[str, object] = {}
        for callback in callbacks:
            name, number = type(callback).__name__, 0
            if name in skipped:
                continue
            while f"{name}_{number}" in self._callbacks:
                number += 1
            self._callbacks[f"{name}_{number}"] = callback
        self._begin: dict[str, dict[str, Any]] = {}

    def note_begin(self) -> None:
        """Note the attributes of the callbacks that they have before the first batch of a run."""
        self._begin = {name: copy.deepcopy(self._plain_attributes(callback)) for name, callback in self._callbacks.items()}

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that have changed, by the names of the callbacks."""
        found = {}
        for name, callback in self._callbacks.items():
            begin = self._begin.get(name, {})
            now = self._plain_attributes(callback)
            found[name] = {key: value for key, value in now.items() if key not in begin or not _is_same(value, begin[key])}
        return found

    def restore(self, saved: dict[str, dict[str, Any]]) -> None:
        """Set the attributes that had changed; callbacks that were not saved, or are no longer used, are left out."""
        for name, attributes in saved.items():
            if name in self._callbacks:
                for key, value in attributes.items():
                    setattr(self._callbacks[name], key, value)

    def _plain_attributes(self, callback: object) -> dict[str, Any]:
        return {key: value for key, value in vars(callback).items() if key not in self._no_state and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (np.ndarray, np.generic)):
        return not value.dtype.hasobject
    return value is None or type(value) in (bool, int, float, str)


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(value, b[key]) for key, value in a.items())
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
