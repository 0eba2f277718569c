"""Writes a step as a Zarr v3 group: an uncompressed array for each leaf, values and ties as attributes."""

from __future__ import annotations

import itertools

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import ByteProgress
from ckpt.tools.common import import_optional
from ckpt.tools.step_contents import Array, Contents, as_raw, check_paths, piece_shape

_CORE_TYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
}  # fmt: skip
"""The types of the core specification, which every implementation reads."""


def write(contents: Contents, path: str, advance: ByteProgress) -> list[str]:
    """Write the group as a directory; return the names of the arrays that it has as plain integers."""
    zarr = import_optional("zarr", "zarr", "restore")
    names = [a.name for a in contents.arrays]
    check_paths(names, "zarr")
    for name in names:
        if any(part == "zarr.json" or part.startswith("__") for part in name.split("/")):
            raise CkptError(f"zarr reserves names such as {name!r}; choose another format for this leaf")
        if "\\" in name:
            raise CkptError(f"zarr would read the backslash in the name {name!r} as '/'; choose another format for this leaf")
    raw = {a.name: a.dtype for a in contents.arrays if not _is_supported(a)}
    attributes = {"step": contents.checkpoint.step, "values": contents.values, "tied": contents.tied}
    group = zarr.open_group(path, mode="w-", zarr_format=3, attributes=attributes)
    for array, pieces in itertools.groupby(contents.read(), key=lambda piece: piece.array):
        dtype, shape = array.raw if array.name in raw else (array.native, array.shape)
        chunk = piece_shape(array.shape, array.numpy.itemsize) + shape[len(array.shape) :]
        made = group.create_array(
            array.name, shape=shape, dtype=dtype, chunks=tuple(max(1, n) for n in chunk), compressors=None,
            attributes={"dtype": array.dtype} if array.name in raw else {},
            # Otherwise zarr leaves out a chunk that equals the fill value, and -0.0 equals 0.0.
            config={"write_empty_chunks": True},
        )  # fmt: skip
        for _, box, data in pieces:
            if data.size:
                plain = as_raw(data) if array.name in raw else data.astype(array.native, copy=False)
                made[(*box.slices(), ...)] = plain
            advance(data.nbytes)
    return list(raw)


def _is_supported(array: Array) -> bool:
    return array.native is not None and array.native.name in _CORE_TYPES
