"""Reads folders of paddle.distributed.save_state_dict as a state whose tensors stay in the files.

The metadata and the files of the ranks are pickles. import_paddle_pickle reads them, and runs nothing of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.state.boxes import Box, flat_boxes
from ckpt.state.dtype_names import numpy_dtype
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.import_files import DAMAGE, FileLeaf, FileRegion, contiguous_strides, insert
from ckpt.tools.import_paddle_names import NAMES, join_states
from ckpt.tools.import_paddle_pickle import PickledObject, read_pickle
from ckpt.tools.import_safetensors import read_safetensors_file

_METADATA_NAME = re.compile(r"\d+\.metadata")
_RECORDS = frozenset({"Metadata", "LocalTensorMetadata", "LocalTensorIndex"})
_FILE_OF_RANK = re.compile(r"\d+_\d+\.(distcp|safetensors)")
_COPY_ADVICE = "copy the metadata and the files of all ranks again"


@dataclass(frozen=True)
class _Part:
    """What one rank has of a tensor."""

    box: Box
    dtype: str
    flat_range: tuple[int, int] | None
    """The elements [start, stop) of the flattened box that are stored; None for all."""
    whole_shape: tuple[int, ...] | None
    """The shape of the tensor, which Paddle 3.0 does not store."""

    @property
    def is_empty(self) -> bool:
        """Whether the rank has nothing of the tensor, because there are more ranks than elements."""
        start, stop = self.flat_range or (0, 1)
        return stop <= start or min(self.box.shape, default=1) <= 0


_PartKey = tuple[str, tuple[int, ...], tuple[int, int] | None]
"""The name of a tensor, and of one of its parts the offset and the flat range."""


def read_state(source: Path) -> Any:
    """Return the state of a folder, or of one of its .metadata files, nested as it was saved.

    A state of "model" and "optimizer" whose tensors are named as those of a layer and its optimizer becomes the state of
    ckpt.adapters.paddle.ModelState.
    """
    path = source
    if source.is_dir():
        found = sorted(file for file in source.iterdir() if _METADATA_NAME.fullmatch(file.name))
        if len(found) != 1:
            names = f"several checkpoints ({', '.join(file.name for file in found[:3])})" if found else "no .metadata file"
            raise CkptError(f"{source} has {names}: name the .metadata file of one")
        path = found[0]
    parts, stored_in, paths = _read_metadata(path)
    files = _Files(path)
    flat = {}
    for name, entries in parts.items():
        where = f"{path}: {name}"
        keys = {part: (name, part.box.offset, part.flat_range) for part in entries if not part.is_empty}
        stored = [(part, files.array(stored_in.get(key), name, where)) for part, key in keys.items()]
        flat[name] = _joined(entries, stored, where)
    return _named_as_whole_model(_nested(flat, paths, path), files.names, paths, path)


# --- the metadata ------------------------------------------------------------------------------------------------


def _read_metadata(path: Path) -> tuple[dict[str, list[_Part]], dict[_PartKey, str], dict[str, tuple[str, ...]]]:
    """Return the parts of each tensor, the file of each part, and the keys of each tensor in the nested state."""
    metadata = read_pickle(path, _RECORDS)
    try:
        tables = metadata.fields
        parts = {str(name): [_part(record) for record in entries] for name, entries in tables["state_dict_metadata"].items()}
        files = {}
        for index, file in tables["storage_metadata"].items():
            if not index.fields.get("replica_id"):  # further copies of a part that is stored already
                files[(index.fields["tensor_key"], _numbers(index.fields["global_offset"]), _flat_range(index))] = file
        paths = {str(name): tuple(map(str, keys)) for name, keys in (tables.get("flat_mapping") or {}).items()}
    except DAMAGE as error:
        raise CkptError(
            f"{path} is not the metadata of paddle.distributed.save_state_dict, or is damaged "
            f"({first_line(error)[:80]}): copy it again"
        ) from error
    return parts, files, paths


def _part(record: PickledObject) -> _Part:
    fields = record.fields
    box = Box(_numbers(fields["global_offset"]), _numbers(fields["local_shape"]))
    numpy_dtype(fields["dtype"])
    whole = fields.get("global_shape")
    return _Part(box, fields["dtype"], _flat_range(record), None if whole is None else _numbers(whole))


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _flat_range(record: PickledObject) -> tuple[int, int] | None:
    if not record.fields.get("is_flattened"):
        return None
    start, stop = _numbers(record.fields["flattened_range"])
    return start, stop


# --- the files of the ranks --------------------------------------------------------------------------------------


class _Files:
    """The files of the ranks, each of which is read once."""

    def __init__(self, metadata: Path) -> None:
        self._metadata = metadata
        self._read: dict[str, dict[str, Any]] = {}
        self.names: dict[str, str] = {}
        """The names that Paddle gave the tensors, such as `linear_0.w_0`, by their names in the state."""

    def array(self, file: str | None, name: str, where: str) -> Any:
        """Return the array of a tensor in a file; raise CkptError if it is missing."""
        if file is None:
            raise CkptError(f"{where} has a part that is in none of the files of the ranks: {_COPY_ADVICE}")
        if not isinstance(file, str) or not _FILE_OF_RANK.fullmatch(file):
            raise CkptError(f"{where} is in {str(file)[:60]!r}, which is not a file that Paddle writes: {_COPY_ADVICE}")
        if file not in self._read:
            self._read[file] = self._arrays(self._metadata.parent / file, where)
        if name not in self._read[file]:
            raise CkptError(f"{where} is missing in {file}, so that the two are not of one save: copy the folder again")
        return self._read[file][name]

    def _arrays(self, path: Path, where: str) -> dict[str, Any]:
        if not path.is_file():
            raise CkptError(f"{where} is in {path.name}, which is missing: {_COPY_ADVICE}")
        if path.suffix == ".safetensors":
            return dict(read_safetensors_file(path))
        arrays = read_pickle(path)
        if not isinstance(arrays, dict):
            raise CkptError(f"{path} is not a file of paddle.distributed.save_state_dict: copy it again")
        names = arrays.pop(NAMES, None)
        if isinstance(names, dict):
            self.names |= {key: given for key, given in names.items() if isinstance(key, str) and isinstance(given, str)}
        return arrays


def _joined(parts: list[_Part], stored: list[tuple[_Part, Any]], where: str) -> FileLeaf:
    """Return the leaf of a tensor of its parts; `stored` has those that are not empty, each with its array."""
    if not parts:
        raise CkptError(f"{where} has no part: {_COPY_ADVICE}")
    dtype, whole = parts[0].dtype, parts[0].whole_shape
    ranks = {len(numbers) for part in parts for numbers in part.box}
    if len(ranks) > 1 or any((part.dtype, part.whole_shape) != (dtype, whole) for part in parts):
        raise CkptError(f"{where} has parts of different types or shapes: {_COPY_ADVICE}")
    if whole is None:
        ends = [[o + n for o, n in zip(*part.box, strict=True)] for part in parts]
        whole = tuple(max(column) for column in zip(*ends, strict=True))
    regions = [pair for part, array in stored for pair in _regions(part, array, where)]
    try:
        return FileLeaf(dtype, whole, regions, "paddle")
    except CkptError as error:
        raise CkptError(f"{where}: {error}") from error


def _regions(part: _Part, array: Any, where: str) -> list[tuple[Box, FileRegion]]:
    """Return the boxes of a part, each with its region of a file. bfloat16 is stored as uint16, and float8 as int8."""
    region = array.single_region if isinstance(array, FileLeaf) else None
    itemsize = numpy_dtype(part.dtype).itemsize
    size = int(np.prod(part.box.shape, dtype=object)) if part.flat_range is None else part.flat_range[1] - part.flat_range[0]
    shape = part.box.shape if part.flat_range is None else (size,)
    if region is None or region.shape != shape or region.itemsize != itemsize or not _same_type(array.dtype, part.dtype):
        raise CkptError(
            f"{where}: the stored part at {list(part.box.offset)} is not the one that the metadata describes: "
            "copy the folder again"
        )
    if part.flat_range is None:
        return [(part.box, region)]
    found, offset = [], region.offset
    for box in flat_boxes(part.box.shape, *part.flat_range):
        strides = contiguous_strides(box.shape, itemsize)
        found.append((box.moved(part.box.offset), FileRegion(region.path, offset, box.shape, strides, itemsize)))
        offset += box.size * itemsize
    return found


def _same_type(stored: str, dtype: str) -> bool:
    return stored == dtype or (stored == "uint16" and dtype == "bfloat16") or (stored == "int8" and dtype.startswith("float8"))


# --- the state ---------------------------------------------------------------------------------------------------


def _nested(flat: dict[str, FileLeaf], paths: dict[str, tuple[str, ...]], where: Path) -> dict[str, Any]:
    """Return the tensors in the dicts of the saved state."""
    root: dict[str, Any] = {}
    for name, leaf in flat.items():
        try:
            insert(root, paths.get(name) or (name,), leaf, len(flat))
        except ValueError as error:
            raise CkptError(
                f"{where}: {name} has the keys of another tensor, so the metadata is damaged: copy it again"
            ) from error
    return root


def _named_as_whole_model(
    state: dict[str, Any], names: dict[str, str], paths: dict[str, tuple[str, ...]], where: Path
) -> dict[str, Any]:
    """Return the state of a ModelState where the optimizer's tensors are named after those of the model."""
    if state.keys() != {"model", "optimizer"} or not all(isinstance(part, dict) for part in state.values()):
        return state
    of_model = {".".join(paths[name][1:]): given for name, given in names.items() if paths.get(name, ())[:1] == ("model",)}
    try:
        return join_states(state["model"], of_model, state["optimizer"], str(where))
    except CkptError:  # names of another program
        return state
