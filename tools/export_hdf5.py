"""Writes a step as an HDF5 file: one dataset for each array, ties as hard links, plain values in an attribute."""

from __future__ import annotations

import itertools
import json
from types import ModuleType

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import ByteProgress
from ckpt.tools.common import import_optional
from ckpt.tools.step_contents import Array, Contents, as_raw, check_paths

_MAX_AXES = 32


def write(contents: Contents, path: str, advance: ByteProgress) -> list[str]:
    """Write the file; return the names of the arrays that it has as plain integers."""
    h5py = import_optional("h5py", "HDF5", "restore")
    check_paths([*(a.name for a in contents.arrays), *contents.tied], "HDF5")
    raw = {a.name: a.dtype for a in contents.arrays if not _is_supported(h5py, a)}
    for array in contents.arrays:
        shape = array.raw[1] if array.name in raw else array.shape
        if len(shape) > _MAX_AXES:
            raise CkptError(
                f"HDF5 has at most {_MAX_AXES} axes, and leaf {array.leaf} needs {len(shape)}; choose another format, or leave "
                "it out with --only"
            )
    # The plain values may need attributes above 64 KiB, which HDF5 has since version 1.8 (2008).
    with h5py.File(path, "w", libver=("v108", "latest"), track_order=True) as file:
        file.attrs["step"] = contents.checkpoint.step
        if contents.values:
            file.attrs["values"] = json.dumps(contents.values)
        for array, pieces in itertools.groupby(contents.read(), key=lambda piece: piece.array):
            dtype, shape = array.raw if array.name in raw else (array.numpy, array.shape)
            dataset = file.create_dataset(array.name, shape, dtype, fill_time="never")
            if array.name in raw:
                dataset.attrs["dtype"] = array.dtype
            for _, box, data in pieces:
                dataset[box.slices()] = as_raw(data) if array.name in raw else data
                advance(data.nbytes)
        for name, first in contents.tied.items():
            file[name] = file[first]
    return list(raw)


def _is_supported(h5py: ModuleType, array: Array) -> bool:
    """Return whether HDF5 stores the type of the array unchanged."""
    if not array.is_numpy:
        return False
    try:
        return bool(h5py.h5t.py_create(array.numpy, logical=True).dtype == array.numpy)
    except (TypeError, ValueError):  # HDF5 has no such type: text, dates, elements without bytes
        return False
