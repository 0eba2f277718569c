"""numpy arrays and numpy scalars."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ckpt.dtypes import dtype_name, numpy_dtype
from ckpt.leaves.base import ArrayLeaf, Bytes, Memory
from ckpt.shard import Box


class HostLeaf(ArrayLeaf):
    """Bytes that numpy can see; other kinds on the host build on it. `array` may have any strides."""

    __slots__ = ("array",)

    array: np.ndarray[Any, Any]

    def read(self, box: Box, out: Bytes) -> None:
        np.copyto(out.view(self.array.dtype).reshape(box.shape), self.array[_index(box)])

    def write(self, box: Box, data: Bytes) -> None:
        np.copyto(self.array[_index(box)], data.view(self.array.dtype).reshape(box.shape))

    def memory(self) -> Memory:
        array = self.array
        return Memory("cpu", array.__array_interface__["data"][0], array.shape, array.strides, self.itemsize)

    def target(self) -> ArrayLeaf:
        if not self.array.flags.writeable:
            raise TypeError("the array is read-only: give a copy of it")
        return self


def _index(box: Box) -> Any:
    """The box as an index that gives a view; without the ellipsis an array without axes would give a scalar."""
    return (*box.slices(), ...)


def flat_bytes(array: np.ndarray[Any, Any]) -> Bytes | None:
    """The memory of a C-contiguous array as bytes, None for another."""
    if not array.flags.c_contiguous:
        return None
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)


class NumpyLeaf(HostLeaf):
    """A numpy array."""

    kind = "numpy"

    __slots__ = ()

    def __init__(self, value: np.ndarray[Any, Any] | np.generic) -> None:
        # A module that another thread imports just now is there, and lacks the class; nor are there objects of it then.
        if isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
            raise TypeError("a masked array is two arrays: store .data and .mask")
        self.value = value
        array = np.asarray(value)
        self.dtype = dtype_name(array.dtype)
        self.shape = array.shape
        self.itemsize = array.dtype.itemsize
        self.nbytes = array.nbytes
        # Seen as raw elements: numpy then never converts, and copies of exotic types are plain memory copies.
        self.array = array if array.dtype.kind in "biufc" else _opaque(array)
        self.flat = flat_bytes(self.array) if self.itemsize else np.empty(0, np.uint8)

    def identity(self) -> tuple[Any, ...] | None:
        return ("host", self.array.__array_interface__["data"][0], self.dtype, self.shape, self.array.strides)


class NumpyScalarLeaf(NumpyLeaf):
    """One numpy scalar: immutable, so that a load hands out a new one."""

    kind = "scalar"

    __slots__ = ()

    def finish(self) -> Any:
        return np.asarray(self.value)[()]

    def target(self) -> ArrayLeaf:
        return NumpyScalarLeaf(np.empty_like(np.asarray(self.value)))

    def identity(self) -> None:
        return None


class BytesLeaf(NumpyLeaf):
    """A long Python bytes or bytearray, kept in the packs rather than in the tree file."""

    kind = "bytes"

    __slots__ = ("_type",)

    def __init__(self, value: np.ndarray[Any, Any], made: type[bytes] | type[bytearray] = bytes) -> None:
        super().__init__(value)
        self._type = made

    def finish(self) -> Any:
        return self._type() if self.flat is None else self._type(self.flat)

    def attributes(self) -> dict[str, Any]:
        return {"type": "bytearray"} if self._type is bytearray else {}

    def identity(self) -> None:
        return None


def empty_leaf(kind: str, dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """A new array of unset bytes; `kind` is numpy, scalar or bytes, of which `type` in the attributes may say bytearray."""
    value = np.empty(shape, numpy_dtype(dtype))
    if kind == "bytes":
        return BytesLeaf(value, bytearray if attributes.get("type") == "bytearray" else bytes)
    return NumpyLeaf(value) if kind == "numpy" else NumpyScalarLeaf(value)


def _opaque(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory with elements that numpy moves but never looks into."""
    size = array.dtype.itemsize
    if not size:
        return array
    return array.view(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
