"""Reads checkpoints of TensorFlow as a state whose arrays stay in the files. TensorFlow is not imported.

A checkpoint is an index, which is a table of LevelDB, and files with the bytes of the tensors one after the other
(tensorflow/core/util/tensor_bundle). An entry of the index has the type, shape, file and offset of a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.tree import join_path
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.import_files import (
    DAMAGE,
    FileLeaf,
    FileRegion,
    contiguous_strides,
    list_folder,
    read_pointer,
    whole_file_leaf,
)
from ckpt.tools.import_leveldb import parse_fields, read_leveldb, read_varint

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The entry with the structure of the Python objects, which the names of the others repeat."""
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_SLOT = "/.OPTIMIZER_SLOT/"
_STRING = 7
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn",
}  # fmt: skip
"""By the numbers of tensorflow/core/framework/types.proto."""


class _Entry(NamedTuple):
    """What the index has of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    is_sliced: bool


def read_state(source: Path, matches: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """Return the tensors by the names of the objects, or by the names of the tensors in a checkpoint without objects.

    source: the index, or a folder of which the newest checkpoint is read.
    matches: whether a name is read; None for all.
    """
    index = _newest_index(source) if source.is_dir() else source
    try:
        table = read_leveldb(index)
        header = parse_fields(table.pop(b"", b""))
        entries = {key.decode(): _entry(value) for key, value in table.items() if not key.startswith(b"\0")}
        shards = int(header.get(1, [1])[0])
    except DAMAGE as error:
        raise CkptError(
            f"{index} is not an index of TensorFlow, or is damaged ({first_line(error)[:100]}): copy it again"
        ) from error
    if header.get(2, [0])[0] != 0:
        raise CkptError(f"{index} was written by a big-endian machine: restore it with TensorFlow, and use ckpt.save")
    state: dict[str, Any] = {}
    for key, entry in entries.items():
        names = _names(key)
        if key != _GRAPH and (matches is None or matches(_joined(names))):
            _insert(state, names, key, _value(index, key, entry, shards))
    return state


def _newest_index(folder: Path) -> Path:
    """Return the index of the newest checkpoint of a folder, or of the variables of a SavedModel."""
    listed = folder / "checkpoint"
    if listed.is_file() and (found := re.search(r'^model_checkpoint_path: "(.*)"$', read_pointer(listed), re.MULTILINE)):
        index = folder / f"{Path(found[1]).name}.index"
        if not index.is_file():
            raise CkptError(f"{listed} names {index.name}, which is missing: copy it, or name the index of another checkpoint")
        return index
    indexes = [*list_folder(folder, "*.index"), *filter(Path.is_file, [folder / "variables" / "variables.index"])]
    if len(indexes) != 1:
        names = ", ".join(path.name for path in indexes[:3]) or "none"
        raise CkptError(f"{folder} has several indexes of TensorFlow or none ({names}): name the index of one checkpoint")
    return indexes[0]


def _entry(data: bytes) -> _Entry:
    """Return a BundleEntryProto."""
    fields = parse_fields(data)

    def number(field: int) -> int:
        return int(fields.get(field, [0])[0])

    dims = parse_fields(_message(fields.get(2, [b""])[0])).get(2, [])
    shape = tuple(int(parse_fields(_message(dim)).get(1, [0])[0]) for dim in dims)
    return _Entry(number(1), shape, number(3), number(4), number(5), 7 in fields)


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of a message")
    return value


def _value(index: Path, key: str, entry: _Entry, shards: int) -> FileLeaf | bytes | list[bytes]:
    """Return the leaf of a tensor, or the strings of one."""
    path = index.with_name(f"{index.name.removesuffix('.index')}.data-{entry.shard:05d}-of-{shards:05d}")
    if entry.is_sliced:
        raise CkptError(
            f"{index}: {key} is a partitioned variable, which can't be imported: restore it with TensorFlow, and save it, or "
            "leave it out with --only"
        )
    if not path.is_file():
        raise CkptError(f"{index} names {path.name}, which is missing: copy it")
    if entry.offset + entry.size > path.stat().st_size:
        raise CkptError(f"{path} ends before {key}, which lies at byte {entry.offset}: copy it again")
    if entry.dtype == _STRING and len(entry.shape) <= 1:
        return _strings(path, key, entry)
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CkptError(
            f"{index}: {key} has the type {entry.dtype} of TensorFlow, which can't be imported: restore it with TensorFlow, "
            "and save it, or leave it out with --only"
        )
    itemsize = numpy_dtype(dtype).itemsize
    if entry.size != math.prod(entry.shape) * itemsize:
        raise CkptError(f"{index}: {key} has {entry.size} bytes, which do not fit its shape {list(entry.shape)}: copy it again")
    region = FileRegion(str(path), entry.offset, entry.shape, contiguous_strides(entry.shape, itemsize), itemsize)
    return whole_file_leaf(region, dtype, "tensorflow", {"variable": True})


def _strings(path: Path, key: str, entry: _Entry) -> bytes | list[bytes]:
    """Return a tensor of strings: their lengths, a checksum, and their bytes."""
    with open(path, "rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.size)
    try:
        at, lengths = 0, []
        for _ in range(math.prod(entry.shape)):
            length, at = read_varint(data, at)
            lengths.append(length)
        at += 4
        found = []
        for length in lengths:
            found.append(data[at : at + length])
            at += length
        if at != len(data):
            raise ValueError(f"{at} bytes in place of {len(data)}")
    except (LookupError, ValueError) as error:
        raise CkptError(f"{path}: the strings of {key} are damaged ({first_line(error)}): copy it again") from error
    return found if entry.shape else found[0]


def _names(key: str) -> list[str]:
    """Return the names of the objects on the way to a tensor; a name of a checkpoint without objects is one name."""
    if not key.endswith(_VALUE) or _SLOT in key:
        return [key]
    path = key.removesuffix(_VALUE).split("/")
    return [re.sub(r"\.(.)", lambda found: "/" if found[1] == "S" else found[1], name) for name in path]


def _joined(names: list[str]) -> str:
    path = ""
    for name in names:
        path = join_path(path, name)
    return path


def _insert(state: dict[str, Any], names: list[str], key: str, value: object) -> None:
    """Put a value into nested dicts; under its whole key where an object on the way is a tensor itself."""
    node: Any = state
    for name in names[:-1]:
        node = node.setdefault(name, {}) if isinstance(node, dict) else None
    if isinstance(node, dict) and names[-1] not in node:
        node[names[-1]] = value
    else:
        state[key] = value
