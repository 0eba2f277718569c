"""Arrays of the frameworks as named bytes: one file a kind. Only kinds whose framework is imported already are asked."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ckpt.leaves.base import ArrayLeaf
from ckpt.leaves.host import NumpyLeaf, NumpyScalarLeaf


def as_leaf(value: Any) -> ArrayLeaf | None:
    """Return the leaf that `value` is, or None where it is no array. Raise TypeError for an array that has no bytes."""
    if isinstance(value, np.ndarray):
        return NumpyLeaf(value)
    if isinstance(value, np.generic):
        return NumpyScalarLeaf(value)
    # An array of a framework that nobody imported cannot exist, so `import ckpt` need not import any.
    if "torch" in sys.modules:
        from ckpt.leaves import torch as torch_leaves

        if (leaf := torch_leaves.as_leaf(value)) is not None:
            return leaf
    if "jax" in sys.modules:
        from ckpt.leaves import jax as jax_leaves

        if (leaf := jax_leaves.as_leaf(value)) is not None:
            return leaf
    return None


def empty_leaf(kind: str, dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return a new leaf of unset bytes, to be filled by a load and then taken by `.value`."""
    if kind == "torch":
        from ckpt.leaves import torch as torch_leaves

        return torch_leaves.empty_leaf(dtype, shape, attributes)
    if kind == "jax":
        from ckpt.leaves import jax as jax_leaves

        return jax_leaves.empty_leaf(dtype, shape, attributes)
    from ckpt.leaves import host

    return host.empty_leaf(kind, dtype, shape)
