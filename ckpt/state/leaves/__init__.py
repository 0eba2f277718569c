"""Arrays and objects of the frameworks as named bytes. A file has the name of its framework; `dtensor` belongs to torch.

Guarantees: a load returns the same dtype, shape and bytes; an array that cannot be stored is refused by name; a save uses only
frameworks that the process has imported and imports none itself. Used by `ckpt.state` and the packages above it. Of
`ckpt.state`, it imports only modules that know nothing of the state tree, such as `boxes`, `dtype_names` and `stateful`.

Start with `base.ArrayLeaf`, then `numpy`. `ckpt.state.frameworks` lists the functions that each file has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckpt.state.frameworks import file_of_kind, framework_file
from ckpt.state.leaves import numpy, sharded
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.numpy import NumpyLeaf, NumpyScalarLeaf
from ckpt.storage.base.errors import CkptError, first_line, is_transient


def as_leaf(value: object) -> ArrayLeaf | None:
    """Return the leaf of an array, or None for a value that is not an array; raise TypeError for an array without bytes."""
    kind = type(value)
    try:
        maker = _leaf_makers[kind]
    except KeyError:
        maker = _leaf_makers[kind] = _leaf_maker(kind)
    if maker is None:
        return None
    try:
        return maker(value)
    except (TypeError, CkptError):
        raise
    except Exception as error:  # frameworks raise errors of any type for an array without memory of its own
        if is_transient(error):
            raise
        message = f"the bytes of a {kind.__name__} cannot be reached ({first_line(error)}): store the plain arrays behind it"
        raise TypeError(message) from error


_leaf_makers: dict[type, Callable[[Any], ArrayLeaf | None] | None] = {}


def _leaf_maker(kind: type) -> Callable[[Any], ArrayLeaf | None] | None:
    """Return the function that makes leaves of values of this type, None if they are not arrays."""
    if issubclass(kind, np.ndarray):
        return NumpyLeaf
    if issubclass(kind, np.generic):
        return NumpyScalarLeaf
    if issubclass(kind, sharded.Shard):
        return sharded.as_leaf
    if issubclass(kind, ArrayLeaf):  # an array that is not in memory, such as one in a file of another program
        return lambda value: value
    framework = framework_file(kind)
    if framework is not None and framework.is_array(kind):
        maker: Callable[[Any], ArrayLeaf | None] = framework.as_leaf
        return maker
    return None


def empty_leaf(kind: str, dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return a new leaf with uninitialised bytes for a load to fill; its `finish` returns the array.

    kind: of the saved leaf: numpy, scalar, bytes, or the name of a framework's file.
    attributes: the saved `ArrayLeaf.attributes()`.

    Raises FormatError for an unknown kind, and LeafMismatch where its framework is not installed.
    """
    if kind in ("numpy", "scalar", "bytes"):
        return numpy.empty_leaf(kind, dtype, shape, attributes)
    made: ArrayLeaf = file_of_kind(kind).empty_leaf(dtype, shape, attributes)
    return made
