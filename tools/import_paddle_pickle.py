"""Reads the pickles that Paddle writes, and runs nothing of them. Paddle is not imported.

The reader builds numbers, strings, containers, the offsets of arrays in the file, and records of the fields of a few named
classes. It refuses all else.
"""

from __future__ import annotations

import collections
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from ckpt.state.boxes import Box
from ckpt.state.dtype_names import dtype_name
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.import_files import FileLeaf, FileRegion, contiguous_strides


def read_pickle(path: Path, records: frozenset[str] = frozenset()) -> Any:
    """Return the object of a pickle, with a FileLeaf for each array, and a PickledObject for each object of the named classes.

    records: names of classes of Paddle, without their modules.

    Raises CkptError for a file that has other objects, or is damaged.
    """
    with open(path, "rb") as file:
        try:
            return _Reader(file, str(path), records).load()
        except _Refused as error:
            raise CkptError(
                f"{path} has {error}, which can't be imported: read it with paddle.load where you trust it, and give its "
                "tensors and values to ckpt.save"
            ) from error
        except (
            pickle.UnpicklingError, EOFError, struct.error, ValueError, TypeError, LookupError, AttributeError, OverflowError,
            RecursionError,
        ) as error:  # fmt: skip
            raise CkptError(
                f"{path} is not written by Paddle, or is damaged ({first_line(error)[:100]}): copy it again"
            ) from error


class _Refused(Exception):
    """The file has an object that is not a number, string, container, array or record."""


class _Bytes:
    """Bytes in the file."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        self._file, self.offset, self.size = file, offset, size

    def read(self) -> bytes:
        at = self._file.tell()
        self._file.seek(self.offset)
        data = self._file.read(self.size)
        self._file.seek(at)
        return data


class _Type:
    """A dtype of numpy."""

    def __init__(self, code: object) -> None:
        if not isinstance(code, str) or not _TYPES.fullmatch(code):
            raise _Refused(f"an array of the type {str(code)[:20]}")
        self.numpy = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise _Refused("an array of big-endian numbers")


class PickledObject:
    """The fields of an object of a class that the reader knows by its name."""

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name
        self.fields: dict[str, Any] = {}

    def set_state(self, state: object) -> None:
        """Take the fields."""
        if not isinstance(state, dict) or self.fields:
            raise ValueError(f"the fields of a {self.class_name} are a {type(state).__name__}")
        self.fields = state


class _PickledClass:
    """A class of which the reader makes records."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Array:
    """An array of numpy."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.type = _Type("b1")
        self.is_fortran = False
        self.data: Any = None

    def set_state(self, state: Any) -> None:
        _, shape, self.type, self.is_fortran, self.data = state
        self.shape = tuple(map(int, shape))
        if min(self.shape, default=0) < 0:
            raise ValueError(f"an array has the shape {list(self.shape)}")
        size = self.data.size if isinstance(self.data, _Bytes) else len(self.data)
        if not isinstance(self.type, _Type) or size != int(np.prod(self.shape, dtype=object)) * self.type.numpy.itemsize:
            raise ValueError(f"an array of shape {list(self.shape)} has {size} bytes")


def _scalar(kind: _Type, data: _Bytes | bytes) -> Any:
    return np.frombuffer(data.read() if isinstance(data, _Bytes) else data, kind.numpy)[0]


def _empty_bytes() -> bytes:
    return b""


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes, which protocol 2 has as text."""
    if encoding != "latin1":
        raise _Refused(f"text encoded as {encoding[:20]}")
    return text.encode("latin1")


_TYPES = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")

_FUNCTIONS: dict[tuple[str, str], Callable[..., object]] = {
    ("builtins", "tuple"): tuple,
    ("__builtin__", "tuple"): tuple,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("numpy", "dtype"): lambda code, *_: _Type(code),
    ("numpy", "ndarray"): lambda *_: _Array(),
    ("__builtin__", "bytes"): _empty_bytes,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
}
"""What a file may name, and what is called in its place."""

_OPCODES = frozenset(b"\x80\x95.(012N\x88\x89IJKML\x8a\x8bFGVX\x8c\x8dBC\x8e)t\x85\x86\x87]lae}dsugh" + b"jpqr\x94c\x93Rb")
"""Those of numbers, strings, bytes, tuples, lists, dicts and the memo; and GLOBAL, STACK_GLOBAL, REDUCE, BUILD."""


def _require_bytes(file: IO[bytes], count: int) -> None:
    """Raise EOFError if fewer bytes follow in a file."""
    end = file.tell() + count
    if end > os.fstat(file.fileno()).st_size:
        raise EOFError(f"it ends before byte {end}")


class _File:
    """A file that is never read beyond its end: otherwise a damaged length would allocate as much memory as it names."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.readline = file, file.readline

    def read(self, count: int) -> bytes:
        _require_bytes(self._file, count)
        return self._file.read(count)


_PythonUnpickler: Any = pickle._Unpickler
"""The unpickler in Python: the one in C reads the bytes of all arrays into memory."""


class _Reader(_PythonUnpickler):  # type: ignore[misc]
    """Builds the object of a pickle with a few operations, and leaves the bytes of arrays in the file."""

    dispatch = {code: method for code, method in _PythonUnpickler.dispatch.items() if code in _OPCODES}

    def __init__(self, file: IO[bytes], path: str, records: frozenset[str]) -> None:
        super().__init__(_File(file), encoding="latin1")
        self._source, self._path, self._records = file, path, records

    def load(self) -> Any:
        state = super().load()
        return _replace(state, lambda array: _leaf(array, self._path))

    def find_class(self, module: str, name: str) -> Any:
        if name in self._records and module.startswith("paddle."):
            return _PickledClass(name)
        try:
            return _FUNCTIONS[module, name]
        except KeyError:
            raise _Refused(f"an object of {module}.{name}"[:120]) from None

    def load_frame(self) -> None:
        """Skip the header of a frame: what is in it follows."""
        self.read(8)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if function not in _FUNCTIONS.values() or not isinstance(arguments, tuple):
            raise _Refused("a call")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        """Make a record in place of an object of its class."""
        arguments = self.stack.pop()
        if not isinstance(self.stack[-1], _PickledClass) or arguments != ():
            raise _Refused("a call")
        self.stack[-1] = PickledObject(self.stack[-1].name)

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (_Array, _Type, PickledObject)):
            raise _Refused(f"a {type(self.stack[-1]).__name__} with attributes")
        self.stack[-1].set_state(state)

    def load_items(self) -> None:
        """Add the items after the mark to the dict or list before it."""
        items = self.pop_mark()
        self._add(items)

    def load_item(self, count: int) -> None:
        items = self.stack[-count:]
        del self.stack[-count:]
        self._add(items)

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise _Refused(f"a {type(target).__name__} with items")

    def load_bytes(self, head: str) -> None:
        (size,) = struct.unpack(head, self.read(struct.calcsize(head)))
        offset = self._source.tell()
        _require_bytes(self._source, size)
        self._source.seek(offset + size)
        self.append(_Bytes(self._source, offset, size))

    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEMS[0]] = dispatch[pickle.APPENDS[0]] = load_items
    dispatch[pickle.SETITEM[0]] = lambda self: self.load_item(2)
    dispatch[pickle.APPEND[0]] = lambda self: self.load_item(1)
    dispatch[pickle.SHORT_BINBYTES[0]] = lambda self: self.load_bytes("<B")
    dispatch[pickle.BINBYTES[0]] = lambda self: self.load_bytes("<I")
    dispatch[pickle.BINBYTES8[0]] = lambda self: self.load_bytes("<Q")


def _replace(value: Any, leaf_of: Callable[[_Array], FileLeaf | np.ndarray[Any, Any]]) -> Any:
    """Return a value with what `leaf_of` returns in place of its arrays, and bytes in place of bytes in the file."""
    if isinstance(value, _Array):
        return leaf_of(value)
    if isinstance(value, _Bytes):
        return value.read()
    if isinstance(value, PickledObject):
        value.fields = _replace(value.fields, leaf_of)
        return value
    if isinstance(value, dict):
        return type(value)((key, _replace(item, leaf_of)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, leaf_of) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        return value
    raise _Refused(f"a {type(value).__name__}")


def _leaf(array: _Array, path: str) -> FileLeaf | np.ndarray[Any, Any]:
    """Return the leaf of an array in the file; an array that protocol 2 has as text is in memory."""
    kind = array.type.numpy
    if not isinstance(array.data, _Bytes):
        return np.frombuffer(array.data, kind).reshape(array.shape, order="F" if array.is_fortran else "C")
    strides = contiguous_strides(array.shape, kind.itemsize)
    if array.is_fortran:
        strides = contiguous_strides(array.shape[::-1], kind.itemsize)[::-1]
    region = FileRegion(path, array.data.offset, array.shape, strides, kind.itemsize)
    return FileLeaf(dtype_name(kind), array.shape, [(Box((0,) * len(array.shape), array.shape), region)], "numpy")
