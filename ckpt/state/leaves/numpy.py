"""Leaves of numpy arrays, numpy scalars and long bytes objects."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Self

import numpy as np

from ckpt.state.boxes import Box
from ckpt.state.dtype_names import dtype_name, numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf, Bytes, MemoryLayout, StridedElements


class HostLeaf(ArrayLeaf):
    """Memory on the host as a numpy array, which may have any strides. Host leaves of other frameworks derive from it."""

    __slots__ = ("array",)

    array: np.ndarray[Any, Any]
    can_alias: ClassVar[bool] = True
    """Whether another array can share the memory and change it."""

    def read(self, box: Box, out: Bytes) -> None:
        np.copyto(out.view(self.array.dtype).reshape(box.shape), self.array[_view_index(box)])

    def write(self, box: Box, data: Bytes) -> None:
        np.copyto(self.array[_view_index(box)], data.view(self.array.dtype).reshape(box.shape))

    @classmethod
    def read_elements(cls, leaves: Sequence[tuple[Self, StridedElements]]) -> list[bytes]:
        return [leaf.array.flat[elements.indices()].tobytes() for leaf, elements in leaves]

    def address(self) -> int | None:
        return None if self.flat is None or not self.can_alias else int(self.array.__array_interface__["data"][0])

    def memory_layout(self) -> MemoryLayout | None:
        if not self.can_alias:
            return None
        array = self.array
        start = array.__array_interface__["data"][0]
        return MemoryLayout("cpu", start, array.shape, array.strides, self.itemsize, self.dtype)


def _view_index(box: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the box as an index that gives a view; without the ellipsis, an array without axes would give a scalar."""
    return (*box.slices(), ...)


def flat_bytes(array: np.ndarray[Any, Any]) -> Bytes | None:
    """Return the memory of a C-contiguous array as bytes, None for an array that is not contiguous."""
    if not array.flags.c_contiguous:
        return None
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)


class NumpyLeaf(HostLeaf):
    """A numpy array."""

    kind = "numpy"

    __slots__ = ()

    def __init__(self, value: np.ndarray[Any, Any] | np.generic) -> None:
        self.value = value
        if type(value) is np.ndarray:
            array = value
        else:
            # While another thread imports numpy.ma, the module may lack the class; then no object of the class exists yet.
            if isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
                raise TypeError("a masked array is two arrays: store .data and .mask")
            array = np.asarray(value)
        self.dtype = dtype_name(array.dtype)
        self.shape = array.shape
        self.itemsize = array.dtype.itemsize
        self.nbytes = array.nbytes
        # Exotic types are viewed as raw elements, so that numpy never converts them and copies plain memory.
        self.array = array if array.dtype.kind in "biufc" else _as_opaque(array)
        self.flat = flat_bytes(self.array) if self.itemsize else np.empty(0, np.uint8)

    def attributes(self) -> Mapping[str, str | bool]:
        value = self.value
        return {} if type(value) is np.ndarray and not value.dtype.names else _class_attribute(value)

    def target(self) -> ArrayLeaf:
        return self if self.array.flags.writeable else _ReadOnlyLeaf(self.value)


class _ReadOnlyLeaf(NumpyLeaf):
    """The target of a read-only array: a new array, which `finish` makes read-only too."""

    __slots__ = ()

    def __init__(self, like: np.ndarray[Any, Any]) -> None:
        super().__init__(np.empty(like.shape, like.dtype).view(type(like)))

    def finish(self) -> Any:
        self.value.flags.writeable = False
        return self.value


class NumpyScalarLeaf(NumpyLeaf):
    """One numpy scalar. It is immutable, so a load returns a new one."""

    kind = "scalar"
    can_alias = False

    __slots__ = ()

    def finish(self) -> Any:
        return scalar_of(np.asarray(self.value))

    def target(self) -> ArrayLeaf:
        return NumpyScalarLeaf(np.empty_like(np.asarray(self.value)))

    def attributes(self) -> Mapping[str, str | bool]:
        return {}


def scalar_of(array: np.ndarray[Any, Any]) -> Any:
    """Return the element of an array without axes. Of text, numpy itself would drop NUL characters at the end."""
    element = array[()]
    if array.dtype.kind not in "SU" or not any(array.tobytes()):  # numpy stores the empty text as one NUL
        return element
    if array.dtype.kind == "S":
        return np.bytes_(array.tobytes())
    return np.str_("".join(map(chr, array.reshape(1).view(f"{array.dtype.byteorder}u4").tolist())))


class BytesLeaf(NumpyLeaf):
    """A long Python bytes or bytearray object, stored in the packs rather than in the tree file."""

    kind = "bytes"
    can_alias = False

    __slots__ = ("_type",)

    def __init__(self, value: np.ndarray[Any, Any], made: type[bytes] | type[bytearray] = bytes) -> None:
        super().__init__(value)
        self._type = made

    def finish(self) -> bytes | bytearray:
        return self._type() if self.flat is None else self._type(self.flat)

    def attributes(self) -> Mapping[str, str | bool]:
        return {"type": "bytearray"} if self._type is bytearray else {}


def empty_leaf(kind: str, dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return a leaf with uninitialised bytes.

    kind: numpy, scalar or bytes.
    attributes: `class` of a numpy array; `type` of bytes, which may be bytearray.
    """
    value = np.empty(shape, numpy_dtype(dtype))
    if kind == "bytes":
        return BytesLeaf(value, bytearray if attributes.get("type") == "bytearray" else bytes)
    return NumpyLeaf(_view_as_class(value, attributes.get("class"))) if kind == "numpy" else NumpyScalarLeaf(value)


_CLASSES = ("matrix", "recarray", "chararray")
"""Classes of numpy that add methods to an array but no data."""


def _class_attribute(value: np.ndarray[Any, Any]) -> dict[str, str]:
    """Return the attribute `class` of an array of one of numpy's classes, `record` where only its elements are records."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy" and kind.__name__ in _CLASSES:
        return {"class": kind.__name__}
    return {"class": "record"} if value.dtype.type is np.record else {}


def _view_as_class(value: np.ndarray[Any, Any], name: str | None) -> np.ndarray[Any, Any]:
    """Return an array as the class that `_class_attribute` named."""
    if name == "record":
        return value.view(np.dtype((np.record, value.dtype)))
    if name in _CLASSES:
        return value.view(np.char.chararray if name == "chararray" else getattr(np, name))
    return value


def _as_opaque(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same memory with elements that numpy copies but never interprets."""
    size = array.dtype.itemsize
    if not size:
        return array
    return array.view(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")
