"""Reads files of paddle.save as a state whose arrays stay in the files.

Such a file is a pickle. import_paddle_pickle reads it, and runs nothing of it. Paddle is not imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ckpt.state.boxes import Box, flat_boxes
from ckpt.state.dtype_names import dtype_name
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_files import FileLeaf, FileRegion, contiguous_strides, list_folder, refuse_damage
from ckpt.tools.import_paddle_names import NAMES, join_states
from ckpt.tools.import_paddle_pickle import read_pickle

_COPY_ADVICE = "copy it again, or read it with paddle.load, and use ckpt.save"
_SPLIT_ARRAYS = "UnpackBigParamInfor@@"
"""The key with the arrays of more than 1 GiB, which protocols 2 and 3 save in parts."""


def read_state(source: Path) -> Any:
    """Return the state of a file; of a folder, the layer and the optimizer of ckpt.adapters.paddle.ModelState."""
    if not source.is_dir():
        return _read_file(source)
    found = {ending: list_folder(source, f"*.{ending}") for ending in ("pdparams", "pdopt")}
    for ending, paths in found.items():
        if len(paths) > 1:
            raise CkptError(f"{source} has several .{ending} files ({', '.join(p.name for p in paths[:3])}): name one of them")
    if not found["pdparams"]:
        raise CkptError(
            f"{source} has no .pdparams file, without which the names of the optimizer have no meaning: name a file"
        )
    model = read_pickle(found["pdparams"][0])
    names = model.get(NAMES) if isinstance(model, dict) else None
    if not found["pdopt"]:
        return {"model": _converted(model, found["pdparams"][0])}
    if not isinstance(names, dict):
        raise CkptError(f"{found['pdparams'][0]} is not a state_dict() of a layer: import each file to a step of its own")
    optimizer = found["pdopt"][0]
    with refuse_damage(optimizer, _COPY_ADVICE):
        return join_states(_converted(model, found["pdparams"][0]), names, _read_file(optimizer), str(optimizer))


def _read_file(path: Path) -> Any:
    return _converted(read_pickle(path), path)


def _converted(state: Any, path: Path) -> Any:
    """Return the state of a file as paddle.load returns it; raise CkptError if its parts do not fit each other."""
    with refuse_damage(path, _COPY_ADVICE):
        return _as_loaded(state)


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor as paddle.save stores it: its name and an array."""
    is_pair = type(value) is tuple and len(value) == 2 and isinstance(value[0], str)
    return is_pair and isinstance(value[1], (FileLeaf, np.ndarray))


def _contains_tensor(value: object) -> bool:
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


def _tensor(array: object) -> FileLeaf:
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

    def read(self, box: Box, out: Bytes) -> None:
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
