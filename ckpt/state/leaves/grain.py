"""Iterators of grain, which have get_state() and set_state(). grain has no arrays of its own."""

from __future__ import annotations

from typing import Any

from ckpt.errors import DAMAGE_ADVICE, FormatError
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.stateful import Stateful


def is_array(kind: type) -> bool:
    """Return False: grain yields arrays of numpy and jax."""
    return False


def as_leaf(value: object) -> ArrayLeaf:
    """Raise TypeError, since no value of grain is an array."""
    raise TypeError(f"a {type(value).__name__} is not an array: store the iterator itself")


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Raise FormatError, since no step has an array of grain."""
    raise FormatError(f"the tree file has an array of grain, which has none; {DAMAGE_ADVICE}")


def as_stateful(value: object) -> Stateful | None:
    """Return the functions that read and set the position of an iterator; None for the other objects of grain."""
    get, put = getattr(value, "get_state", None), getattr(value, "set_state", None)
    return Stateful(get, put) if callable(get) and callable(put) else None


def is_random_generator(value: object) -> bool:
    """Return whether each rank of a group stores its own value: each reads its own part of the data."""
    return as_stateful(value) is not None


def advice(value: object) -> str | None:
    """Return what to store in place of an object of grain that has no position."""
    return "a data set or loader of grain has no position: store its iterator, iter(…)"
