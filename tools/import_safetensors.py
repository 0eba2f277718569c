"""Reads safetensors files, and folders of them with an index, as a state whose arrays stay in the files."""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import Any

from ckpt.errors import FormatError
from ckpt.state.dtype_names import numpy_dtype
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import CkptError
from ckpt.tools.export_safetensors import HEADER_LIMIT, TYPE_CODES
from ckpt.tools.export_torch import TENSOR_TYPES
from ckpt.tools.import_files import FileLeaf, FileRegion, contiguous_strides, list_folder, whole_file_leaf

_DTYPES = {code: name for name, code in TYPE_CODES.items()}
INDEX_SUFFIX = ".index.json"
_NUMBERED_FILE = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def read_state(source: Path) -> dict[str, FileLeaf]:
    """Return the arrays of a file, of an index and its files, or of a folder, by name."""
    if source.is_dir():
        indexes = list_folder(source, f"*.safetensors{INDEX_SUFFIX}")
        if len(indexes) > 1:
            raise CkptError(f"{source} has several indexes ({', '.join(i.name for i in indexes)}): name the one to import")
        if not indexes:
            return _join(_require_all_parts(list_folder(source, "*.safetensors")))
        source = indexes[0]
    if not source.name.endswith(INDEX_SUFFIX):
        return read_safetensors_file(source)
    file_of = read_index(source)
    found = _join([source.parent / name for name in sorted(set(file_of.values()))])
    missing = sorted(file_of.keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CkptError(f"{source} names {missing[0]}{more}, which its files lack: download the files again")
    return {name: found[name] for name in file_of}


def read_index(source: Path) -> dict[str, str]:
    """Return the file of each array of an index; raise CkptError for one that is damaged, or names files elsewhere."""
    try:
        file_of = parse_json(source.read_bytes())["weight_map"]
        names = set(file_of.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CkptError(f"{source} is not an index of a model ({error!r}): download it again") from error
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name):
            raise CkptError(
                f"{source} names the file {name!r}, which is not in its folder: move it there, and correct the name"
            )
        if not (source.parent / name).is_file():
            raise CkptError(f"{source} names {name}, which is missing: download it")
    return dict(file_of)


def _require_all_parts(paths: list[Path]) -> list[Path]:
    """Return the files of a folder without an index; raise CkptError if one of those that their names number is missing."""
    names = {path.name for path in paths}
    for path in paths:
        if (found := _NUMBERED_FILE.fullmatch(path.name)) is None:
            continue
        begin, number, count = found[1], len(found[2]), int(found[3])
        for part in range(1, min(count, len(paths) + 1) + 1):
            if (name := f"{begin}-{part:0{number}}-of-{found[3]}.safetensors") not in names:
                raise CkptError(f"{path.parent} has {path.name}, but {name} is missing: download it")
    return paths


def _join(paths: list[Path]) -> dict[str, FileLeaf]:
    found: dict[str, FileLeaf] = {}
    for path in paths:
        for name, leaf in read_safetensors_file(path).items():
            if name in found:
                raise CkptError(f"several files of {path.parent} have an array {name}: import each file to a step of its own")
            found[name] = leaf
    return found


def read_safetensors_file(path: Path) -> dict[str, FileLeaf]:
    """Return the arrays of one file by name; raise CkptError if its header is damaged."""
    header, start = _read_header(path)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise CkptError(f"{path}: the header entry __metadata__ is not a JSON object, so it is damaged: copy the file again")
    kind = "torch" if metadata.get("format", "pt") == "pt" else "numpy"
    true_types = _json_object(metadata.get("dtypes"))
    room = path.stat().st_size - start
    found = {}
    for name, entry in header.items():
        try:
            dtype, shape, (first, end) = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            if any(type(number) is not int for number in (*shape, first, end)) or min(shape, default=0) < 0:
                raise ValueError("a length or an offset is not a whole number")
        except (KeyError, TypeError, ValueError) as error:
            raise CkptError(f"{path}: the header entry of {name} is damaged ({error!r}); copy the file again") from error
        if dtype is None:
            raise CkptError(f"{path}: {name} has the type {entry['dtype']}, which ckpt can't store: convert it first")
        itemsize = numpy_dtype(dtype).itemsize
        if not (0 <= first <= end <= room and end - first == itemsize * math.prod(shape)):
            raise CkptError(f"{path}: the bytes of {name} do not fit the file or its shape {shape}; copy the file again")
        dtype, shape = _true_type(dtype, shape, true_types.get(name))
        itemsize = numpy_dtype(dtype).itemsize
        region = FileRegion(str(path), start + first, shape, contiguous_strides(shape, itemsize), itemsize)
        found[name] = whole_file_leaf(region, dtype, kind if dtype in TENSOR_TYPES else "numpy")
    tied = _json_object(metadata.get("tied"))
    return {name: found[first] for name, first in tied.items() if isinstance(first, str) and first in found} | found


def _json_object(text: Any) -> dict[str, Any]:
    """Return an object that `ckpt-restore` wrote into the metadata; an empty one for what another program wrote there."""
    try:
        found = parse_json(text)
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _true_type(dtype: str, shape: tuple[int, ...], given: Any) -> tuple[str, tuple[int, ...]]:
    """Return type and shape of an array that `ckpt-restore` wrote as plain integers, because the format lacks its type.

    given: the type that the metadata names; one that does not fit is ignored.
    """
    try:
        itemsize = numpy_dtype(given).itemsize if isinstance(given, str) and given not in TYPE_CODES else 0
    except FormatError:
        itemsize = 0
    if itemsize in (1, 2, 4, 8):
        return (given, shape) if dtype == f"uint{8 * itemsize}" else (dtype, shape)
    return (given, shape[:-1]) if itemsize and dtype == "uint8" and shape[-1:] == (itemsize,) else (dtype, shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its arrays begin."""
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else HEADER_LIMIT + 1
        text = file.read(length) if length <= HEADER_LIMIT else b""
    try:
        if len(text) != length:
            raise ValueError("it is shorter than its header")
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
    except ValueError as error:
        raise CkptError(f"{path} is not a safetensors file, or is damaged ({error}): copy it again") from error
    return header, 8 + length
