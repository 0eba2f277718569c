"""Names of element types, the same for every framework: `float32`, `bfloat16`, `float8_e4m3fn`, `int4` …

A type that has no such name (big-endian, text, dates, records) is stored as `numpy:` and numpy's own descr in JSON.
Elements are stored as in memory: little-endian unless the descr names another order, and one byte each for the 4-bit and 2-bit
types of ml_dtypes.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from ckpt.errors import DAMAGE_ADVICE, FormatError
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import is_transient

# Types of torch that numpy and older releases of ml_dtypes lack, with a numpy dtype of the same size.
_FOREIGN = {
    "complex32": np.dtype(getattr(ml_dtypes, "complex32", [("real", "<f2"), ("imag", "<f2")])),
    "float4_e2m1fn_x2": np.dtype("uint8"),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), np.dtype("uint8")),
    "bits16": np.dtype("uint16"),
    **{
        name: np.dtype("uint8")
        for name in (f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8))
        if not hasattr(ml_dtypes, name)
    },
}


LARGEST_ELEMENT = 8 << 20
"""Bytes of a block: a block contains whole elements, so no element may be larger."""

_MAX_LEVELS = 50
"""The most levels of structures in structures. More are an attempt to use up the stack."""


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the stored name of a numpy dtype, such as "float32" or "bfloat16".

    Raises:
        TypeError: Elements are Python objects or larger than a block, or records whose name gives another type back.
    """
    if dtype.hasobject:
        raise TypeError("elements are Python objects, which only pickle could store: turn them into arrays and plain values")
    if dtype.itemsize > LARGEST_ELEMENT:
        raise TypeError(
            f"an element has {dtype.itemsize} bytes, more than the maximum of {LARGEST_ELEMENT}: store text as str, and "
            "each field as an array"
        )
    if getattr(ml_dtypes, dtype.name, None) is not None:
        return dtype.name
    # Not `isbuiltin == 1`, which is false for an equal dtype that was unpickled.
    if dtype.isbuiltin != 2 and dtype.isnative and dtype.kind in "biufc":
        return dtype.name
    name = "numpy:" + json.dumps(np.lib.format.dtype_to_descr(dtype))
    if not _gives_back(name, dtype):
        raise TypeError(
            "a record of this type has no name that numpy can read, as it has fields of ml_dtypes, arrays of arrays, or more "
            f"than {_MAX_LEVELS} levels: store each field as an array"
        )
    return name


def _gives_back(name: str, dtype: np.dtype[Any]) -> bool:
    """Return whether a load gets exactly this type from its name."""
    try:
        return numpy_dtype(name) == dtype
    except FormatError:
        return False


@lru_cache(maxsize=256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a stored name.

    Raises:
        FormatError: The name is unknown, or its elements are Python objects.
    """
    if name in _FOREIGN:
        return _FOREIGN[name]
    try:
        if name.startswith("numpy:"):
            dtype = np.lib.format.descr_to_dtype(_descr_with_tuples(parse_json(name[6:])))
        else:
            dtype = np.dtype(vars(ml_dtypes).get(name) or name)
    except Exception as error:
        if is_transient(error):
            raise
        raise FormatError(
            f"unknown element type {name!r}: install a newer ckpt-store and ml_dtypes, one of which may know it"
        ) from error
    if dtype.hasobject:
        raise FormatError(f"element type {name!r} consists of Python objects, which are not loaded; {DAMAGE_ADVICE}")
    return dtype


def _descr_with_tuples(descr: Any, levels: int = _MAX_LEVELS) -> Any:
    """Return a descr with tuples where JSON has lists. Raises ValueError if it has more levels.

    A descr is text, or a list of fields (name, descr[, shape]); a name is text or a pair.
    """
    if isinstance(descr, str):
        return descr
    if not levels:
        raise ValueError("it is nested too deeply")
    return [
        (tuple(f[0]) if isinstance(f[0], list) else f[0], _descr_with_tuples(f[1], levels - 1), *(tuple(s) for s in f[2:]))
        for f in descr
    ]
