"""The functions that a load calls after all bytes are read, and that return the loaded values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ckpt.errors import LeafMismatch
from ckpt.state.boxes import whole_box
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.static_values import keeps_functions
from ckpt.state.tree import Node
from ckpt.state.tree_rebuild import scalar_bytes

T = TypeVar("T", bound=tuple[object, ...])

Finish = Callable[[], Any]
"""Returns a loaded value. It is called after all bytes are read."""


def tuple_like(like: T, values: list[object]) -> T:
    """Return a tuple of the type of `like` with these values."""
    try:
        return tuple.__new__(type(like), values)  # the constructor of a namedtuple would take each value as an argument
    except TypeError:  # a type of an extension module, such as torch.Size
        return type(like)(values)


def dataclass_like(like: Any, parts: dict[str, Finish]) -> Any:
    """Set fields of a dataclass to the values that `parts` return, and return it; if it is immutable, a new one."""
    made = like
    if type(like).__dataclass_params__.frozen or keeps_functions(like):  # the modules of equinox are immutable
        made = object.__new__(type(like))
        for field in dataclasses.fields(like):
            object.__setattr__(made, field.name, getattr(like, field.name))
    for name, part in parts.items():
        object.__setattr__(made, name, part())
    return made


def finish_once(leaf: ArrayLeaf, name: str) -> Finish:
    """Return the function that finishes a filled leaf at its first call, and then returns the same value.

    It raises LeafMismatch with the name where the framework can't make such an array.
    """
    made: list[object] = []

    def finish() -> object:
        if not made:
            try:
                made.append(leaf.finish())
            except TypeError as error:
                raise LeafMismatch(f"leaf {name}: {error}") from error
        return made[0]

    return finish


def fill_scalar(target: ArrayLeaf, node: Node) -> Finish:
    """Return the function that writes a scalar of the tree into an array without axes."""
    data = np.frombuffer(scalar_bytes(node), np.uint8)
    parts = target.shards()

    def finish() -> object:
        for leaf in [target] if parts is None else [part.leaf for part in parts]:
            if leaf.nbytes:
                leaf.write(whole_box(()), data)
        return target.finish()

    return finish
