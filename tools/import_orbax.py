"""Reads checkpoints of Orbax as a state whose arrays stay in the files.

TensorStore reads the arrays. Orbax and jax are not imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.state.boxes import Box
from ckpt.state.dtype_names import dtype_name
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.tools.common import import_optional
from ckpt.tools.import_files import DAMAGE, FileLeaf, insert, list_folder, refuse_damage

_METADATA = "_METADATA"
_MAX_CACHE_BYTES = 1 << 30
"""The most memory for stored chunks. Beyond it, an import decompresses chunks again for each block, and becomes slow."""
_INDEX_BYTES = 32 << 20
"""The memory for the index of the arrays."""
_SEQUENCE = 1
"""The `key_type` of an index of a list or tuple; that of a key of a dict is 2."""
_KINDS = {"jax.Array": "jax", "np.ndarray": "numpy", "scalar": "scalar"}
"""By `value_type`: the kind of the leaf. A scalar becomes a plain value."""


@dataclass(frozen=True, slots=True)
class _StoredArray:
    """An array that TensorStore has opened."""

    key: tuple[str, str]
    """The folder and the name, which identify it."""
    shape: tuple[int, ...]
    array: Any

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StoredArray) and self.key == other.key

    def read(self, box: Box, out: Bytes) -> None:
        """Copy the elements of a box, in C order, to `out`."""
        try:
            data = self.array[(*box.slices(), ...)].read().result()
        except (ValueError, OSError, RuntimeError) as error:
            raise CkptError(f"{' '.join(self.key)} can't be read ({first_line(error)[:150]}): copy the folder again") from error
        out[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def read_state(source: Path) -> Any:
    """Return the state of a step of Orbax, or of the newest step of a folder of a CheckpointManager."""
    folder = _folder_of_arrays(source)
    try:
        metadata = parse_json((folder / _METADATA).read_bytes())
        entries = [
            ([_key(key) for key in entry["key_metadata"]], str(entry["value_metadata"]["value_type"]))
            for entry in metadata["tree_metadata"].values()
        ]
    except DAMAGE as error:
        raise CkptError(f"{folder / _METADATA} is damaged ({first_line(error)}): copy the folder again") from error
    is_complete = bool(metadata.get("store_array_data_equal_to_fill_value", False))
    arrays = _Arrays(folder, bool(metadata.get("use_zarr3", False)), is_complete)
    with refuse_damage(folder, "copy the folder again"):
        arrays.open([_name(keys) for keys, value_type in entries if value_type in _KINDS])
        return _nested(entries, arrays)


def _nested(entries: list[tuple[list[str | int], str]], arrays: _Arrays) -> Any:
    """Return the values in dicts and lists; raise ValueError if the keys of a value are unusable or taken."""
    root: Any = [] if entries and entries[0][0] and isinstance(entries[0][0][0], int) else {}
    for keys, value_type in entries:
        if not keys:
            raise ValueError("an entry has no keys")
        insert(root, keys, arrays.read(keys, value_type), len(entries))
    return root


def _folder_of_arrays(source: Path) -> Path:
    """Return the folder with the arrays: the source, an item of it, or an item of its newest step."""
    steps = sorted((path for path in list_folder(source, "*") if path.name.isdecimal()), key=lambda path: -int(path.name))
    for step in [source, *steps]:
        # A step that can't be listed is not left out: an older one would be imported in its place.
        items = source.glob("*") if step == source else list_folder(step, "*") if step.is_dir() else []
        found = sorted(path.parent for path in [step / _METADATA, *(item / _METADATA for item in items)] if path.is_file())
        if len(found) > 1:
            raise CkptError(f"{step} has the items {', '.join(path.name for path in found)}: name the folder of one of them")
        if found:
            return found[0]
    raise CkptError(f"{source} has no {_METADATA}, so it is not a complete checkpoint of Orbax: name the folder of a step")


def _name(keys: list[str | int]) -> str:
    return ".".join(map(str, keys))


def _key(entry: dict[str, Any]) -> str | int:
    return int(entry["key"]) if entry["key_type"] == _SEQUENCE else str(entry["key"])


class _Arrays:
    """Opens the arrays of a folder. is_complete: whether it has every chunk; older versions of Orbax leave out zeros."""

    def __init__(self, folder: Path, use_zarr3: bool, is_complete: bool) -> None:
        self._folder = folder.absolute()
        self._use_ocdbt = (folder / "manifest.ocdbt").exists()  # older versions do not record it in the metadata
        self._driver = "zarr3" if use_zarr3 else "zarr"
        self._is_complete = is_complete
        self._tensorstore = import_optional("tensorstore", "a checkpoint of Orbax", "orbax")
        self._context = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._opened: dict[str, Any] = {}

    def open(self, names: list[str]) -> None:
        """Open arrays, with a cache that is as large as the one of them with the most bytes to cache."""
        opened = [self._open_without_cache(name) for name in names]
        limit = min(max(map(_bytes_to_cache, opened), default=0) + _INDEX_BYTES, _MAX_CACHE_BYTES)
        cache = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": limit}})
        for name, array in zip(names, opened, strict=True):
            spec = array.spec()  # with the metadata, so that no file is read again
            self._opened[name] = self._tensorstore.open(spec, read=True, assume_metadata=True, context=cache).result()

    def read(self, keys: list[str | int], value_type: str) -> Any:
        """Return the leaf of an array that is open, or a plain value."""
        name = _name(keys)
        if value_type in ("None", "Dict", "List", "Tuple"):  # empty containers have no array
            return {"None": None, "Dict": {}, "List": [], "Tuple": ()}[value_type]
        if value_type not in _KINDS:
            raise CkptError(
                f"{self._folder}: {name} is a {value_type}, which can't be imported: restore it with Orbax, and save it"
            )
        array = self._opened[name]
        if _KINDS[value_type] == "scalar":
            return np.asarray(array.read().result()).item()
        dtype, shape = dtype_name(np.dtype(array.dtype.numpy_dtype)), tuple(array.shape)
        stored: Any = _StoredArray((str(self._folder), name), shape, array)
        return FileLeaf(dtype, shape, [(Box((0,) * len(shape), shape), stored)], _KINDS[value_type])

    def _open_without_cache(self, name: str) -> Any:
        if ".." in Path(name).parts:
            raise CkptError(
                f"{self._folder}: {name!r} is outside of the folder, where no array is read: move it into the folder"
            )
        store: dict[str, str] = {"driver": "file", "path": f"{self._folder}/{name}/"}
        if self._use_ocdbt:
            store = {"driver": "ocdbt", "base": f"file://{self._folder}/", "path": f"{name}/"}
        spec = {"driver": self._driver, "kvstore": store, "recheck_cached_data": False, "recheck_cached_metadata": False}
        if self._is_complete:
            spec["fill_missing_data_reads"] = False
        try:
            return self._tensorstore.open(spec, read=True, context=self._context).result()
        except (ValueError, OSError, RuntimeError) as error:
            raise CkptError(
                f"{self._folder}: {name} can't be opened ({first_line(error)[:150]}): copy the folder again"
            ) from error


def _bytes_to_cache(array: Any) -> int:
    """Return the bytes of the chunks that have a part of the same rows.

    An import reads blocks of rows one after the other. It reads these chunks again for each block until their rows are done.
    """
    chunk = array.chunk_layout.read_chunk.shape or ()  # None for an array without axes
    others = (-(-length // part) * part for length, part in zip(array.shape[1:], chunk[1:], strict=True))
    return int(math.prod((*chunk[:1], *others)) * array.dtype.numpy_dtype.itemsize)
