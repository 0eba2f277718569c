"""What the other callbacks of a `fit` count, which a callback of ckpt saves with the training."""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from ckpt.errors import FormatError

log = logging.getLogger("ckpt")

_CONTAINERS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (deque, set, frozenset, defaultdict, OrderedDict, Counter)
}  # fmt: skip
"""Containers that a step has only as the list of their items."""
_KIND = "container of a callback"
"""The key of the kind of such a container in a step."""


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
        self._named: set[tuple[str, str]] = set()
        """The attributes that a warning has named."""

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
            self._warn_of_others(name, callback)
        return found

    def _warn_of_others(self, name: str, callback: object) -> None:
        """Warn once of each container that counts something, and whose values can't be stored."""
        for key, value in vars(callback).items():
            is_container = type(value) in _CONTAINERS.values() and key not in self._no_state and len(value)
            if is_container and (name, key) not in self._named and not _is_plain(value):
                self._named.add((name, key))
                log.warning(
                    "%s.%s is not saved, because the %s has values other than numbers, texts and arrays: a resumed training "
                    "begins without them; keep numbers there",
                    type(callback).__name__, key, type(value).__name__,
                )  # fmt: skip

    def restore(self, saved: dict[str, dict[str, Any]]) -> None:
        """Set the attributes that had changed; callbacks that were not saved, or are no longer used, are left out."""
        for name, attributes in saved.items():
            if name in self._callbacks:
                callback = self._callbacks[name]
                for key, value in attributes.items():
                    setattr(callback, key, _from_stored(value, getattr(callback, key, None)))

    def _plain_attributes(self, callback: object) -> dict[str, Any]:
        return {
            key: _to_stored(value) for key, value in vars(callback).items() if key not in self._no_state and _is_plain(value)
        }


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, deque, set, frozenset):
        return all(_is_plain(item) for item in value)
    if type(value) in (dict, defaultdict, OrderedDict, Counter):
        return all(_is_key(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (np.ndarray, np.generic)):
        return not value.dtype.hasobject
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(each) for each in key)
    return key is None or type(key) in (bool, int, float, str, bytes)


def _to_stored(value: Any) -> Any:
    """Return a plain value with dicts of lists in place of the containers that a step can't have."""
    if type(value) in (list, tuple):
        return type(value)(_to_stored(item) for item in value)
    if type(value) is dict:
        return {key: _to_stored(item) for key, item in value.items()}
    if type(value) not in _CONTAINERS.values():
        return value
    if isinstance(value, dict):
        items = [[key, _to_stored(item)] for key, item in value.items()]
    else:
        items = [_to_stored(item) for item in (sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)]
    limit = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
    return {_KIND: type(value).__name__, "items": items, **limit}


def _from_stored(value: Any, current: Any) -> Any:
    """Return a value as it was before `_to_stored`. current: the value that the callback has; a defaultdict has a function."""
    if type(value) in (list, tuple):
        return type(value)(_from_stored(item, None) for item in value)
    if type(value) is not dict:
        return value
    if _KIND not in value:
        inner = current if isinstance(current, dict) else {}
        return {key: _from_stored(item, inner.get(key)) for key, item in value.items()}
    kind = _CONTAINERS.get(value[_KIND])
    if kind is None:
        raise FormatError(f"a callback was saved with a {value[_KIND]}, which this version of ckpt can't load: update ckpt")
    if kind is deque:
        return deque((_from_stored(item, None) for item in value["items"]), value["maxlen"])
    if not issubclass(kind, dict):
        return kind(_from_stored(item, None) for item in value["items"])
    items = {key: _from_stored(item, None) for key, item in value["items"]}
    return defaultdict(getattr(current, "default_factory", None), items) if kind is defaultdict else kind(items)


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(value, b[key]) for key, value in a.items())
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
