"""Reads files of paddle.save as a state whose arrays stay in the files.

Such a file is a pickle. The reader here builds numbers, strings, containers, and the offsets of arrays in the file. It refuses
all else, and runs nothing of it. Paddle is not imported.
"""

from __future__ import annotations

import collections
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from ckpt.state.boxes import Box, flat_boxes
from ckpt.state.dtypes import dtype_name
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.import_files import FileLeaf, FileRegion, contiguous_strides
from ckpt.tools.import_paddle_names import join_states

NAMES = "StructuredToParameterName@@"
"""The key of a saved state dict with Paddle's names of its tensors."""
_SPLIT_ARRAYS = "UnpackBigParamInfor@@"
"""The key with the arrays of more than 1 GiB, which protocols 2 and 3 save in parts."""
_TYPES = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")


def read_state(source: Path) -> Any:
    """Return the state of a file; of a folder, the layer and the optimizer of ckpt.adapters.paddle.ModelState."""
    if not source.is_dir():
        return _as_loaded(_read(source))
    found = {ending: sorted(source.glob(f"*.{ending}")) for ending in ("pdparams", "pdopt")}
    for ending, paths in found.items():
        if len(paths) > 1:
            raise CkptError(f"{source} has several .{ending} files ({', '.join(p.name for p in paths[:3])}): name one of them")
    if not found["pdparams"]:
        raise CkptError(
            f"{source} has no .pdparams file, without which the names of the optimizer have no meaning: name a file"
        )
    model = _read(found["pdparams"][0])
    names = model.get(NAMES) if isinstance(model, dict) else None
    if not found["pdopt"]:
        return {"model": _as_loaded(model)}
    if not isinstance(names, dict):
        raise CkptError(f"{found['pdparams'][0]} is no state_dict() of a layer: import each file to a step of its own")
    return join_states(_as_loaded(model), names, _as_loaded(_read(found["pdopt"][0])), str(found["pdopt"][0]))


def _read(path: Path) -> Any:
    with open(path, "rb") as file:
        try:
            return _Reader(file, str(path)).load()
        except _Refused as error:
            raise CkptError(
                f"{path} has {error}, which can't be imported: read it with paddle.load where you trust it, and give its "
                "tensors and values to ckpt.save"
            ) from error
        except (pickle.UnpicklingError, EOFError, struct.error, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CkptError(
                f"{path} is no file of paddle.save, or is damaged ({first_line(error)[:100]}): copy it again"
            ) from error


class _Refused(Exception):
    """The file has an object that is no number, string, container or array."""


# --- the pickle --------------------------------------------------------------------------------------------------


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

    def __init__(self, code: Any) -> None:
        if not isinstance(code, str) or not _TYPES.fullmatch(code):
            raise _Refused(f"an array of the type {str(code)[:20]}")
        self.numpy = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if state[1] not in ("<", "|", "="):
            raise _Refused("an array of big-endian numbers")


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
        size = self.data.size if isinstance(self.data, _Bytes) else len(self.data)
        if not isinstance(self.type, _Type) or size != int(np.prod(self.shape, dtype=object)) * self.type.numpy.itemsize:
            raise ValueError(f"an array of shape {list(self.shape)} has {size} bytes")


def _scalar(kind: _Type, data: Any) -> Any:
    return np.frombuffer(data.read() if isinstance(data, _Bytes) else data, kind.numpy)[0]


def _empty_bytes() -> bytes:
    return b""


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes, which protocol 2 has as text."""
    if encoding != "latin1":
        raise _Refused(f"text encoded as {encoding[:20]}")
    return text.encode("latin1")


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
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


_PythonUnpickler: Any = pickle._Unpickler
"""The one in C reads the bytes of all arrays into memory."""


class _Reader(_PythonUnpickler):  # type: ignore[misc]
    """Builds the object of a pickle with a few operations, and leaves the bytes of arrays in the file."""

    dispatch = {code: method for code, method in _PythonUnpickler.dispatch.items() if code in _OPCODES}

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file, encoding="latin1")
        self._source, self._path = file, path
        self._length = Path(path).stat().st_size

    def load(self) -> Any:
        state = super().load()
        return _replace(state, lambda array: _leaf(array, self._path))

    def find_class(self, module: str, name: str) -> Any:
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

    def load_build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], (_Array, _Type)):
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
        if offset + size > self._length:
            raise EOFError(f"it ends before byte {offset + size}")
        self._source.seek(offset + size)
        self.append(_Bytes(self._source, offset, size))

    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEMS[0]] = dispatch[pickle.APPENDS[0]] = load_items
    dispatch[pickle.SETITEM[0]] = lambda self: self.load_item(2)
    dispatch[pickle.APPEND[0]] = lambda self: self.load_item(1)
    dispatch[pickle.SHORT_BINBYTES[0]] = lambda self: self.load_bytes("<B")
    dispatch[pickle.BINBYTES[0]] = lambda self: self.load_bytes("<I")
    dispatch[pickle.BINBYTES8[0]] = lambda self: self.load_bytes("<Q")


# --- the state ---------------------------------------------------------------------------------------------------


def _replace(value: Any, leaf_of: Callable[[_Array], Any]) -> Any:
    """Return a value with what `leaf_of` returns in place of its arrays, and bytes in place of bytes in the file."""
    if isinstance(value, _Array):
        return leaf_of(value)
    if isinstance(value, _Bytes):
        return value.read()
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


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor as paddle.save stores it: its name and an array."""
    is_pair = type(value) is tuple and len(value) == 2 and isinstance(value[0], str)
    return is_pair and isinstance(value[1], (FileLeaf, np.ndarray))


def _contains_tensor(value: Any) -> bool:
    if _is_tensor(value):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_contains_tensor, items))


def _as_loaded(state: Any) -> Any:
    """Return a state with the types that paddle.load gives it: in a state dict, all arrays are tensors."""
    if isinstance(state, dict):
        _join_split_arrays(state)
        names = state.pop(NAMES, None)
        if isinstance(names, dict):
            return {key: _tensor(value) if key in names else _tensors(value, False) for key, value in state.items()}
    return _tensors(state, not _contains_tensor(state))


def _tensors(value: Any, arrays_are_tensors: bool) -> Any:
    if _is_tensor(value):
        return _tensor(value[1])
    if isinstance(value, (FileLeaf, np.ndarray)):
        return _tensor(value) if arrays_are_tensors else value
    if isinstance(value, dict):
        return type(value)((key, _tensors(item, arrays_are_tensors)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_tensors(item, arrays_are_tensors) for item in value)
    return value


def _tensor(array: Any) -> Any:
    """Return an array as a tensor of Paddle, which stores bfloat16 as uint16."""
    if not isinstance(array, FileLeaf):
        raw = np.array(array, order="C")
        region: Any = _Memory(raw)
        array = FileLeaf(dtype_name(raw.dtype), raw.shape, [(Box((0,) * raw.ndim, raw.shape), region)], "paddle")
    dtype = "bfloat16" if array.dtype == "uint16" else array.dtype
    return FileLeaf(dtype, array.shape, array.regions, "paddle")


class _Memory:
    """An array in memory, as a region of a FileLeaf."""

    def __init__(self, array: Any) -> None:
        self._array, self.shape = array, array.shape

    def read(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        out[:] = np.ascontiguousarray(self._array[(*box.slices(), ...)]).reshape(-1).view(np.uint8)


def _join_split_arrays(state: dict[str, Any]) -> None:
    """Put the parts of large arrays together, in place."""
    for name, entry in state.pop(_SPLIT_ARRAYS, {}).items():
        parts, shape = [state.pop(part) for part in entry["slices"]], tuple(map(int, entry["OriginShape"]))
        if not all(isinstance(part, FileLeaf) for part in parts):
            state[name] = np.concatenate(parts).reshape(shape)
            continue
        regions, start = [], 0
        for part in parts:
            ((_, region),) = part.regions
            offset = region.offset
            for box in flat_boxes(shape, start, start + part.shape[0]):
                strides = contiguous_strides(box.shape, region.itemsize)
                regions.append((box, FileRegion(region.path, offset, box.shape, strides, region.itemsize)))
                offset += box.size * region.itemsize
            start += part.shape[0]
        state[name] = FileLeaf(parts[0].dtype, shape, regions, "numpy")
