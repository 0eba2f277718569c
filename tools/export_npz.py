"""Writes a step as a .npz file: an uncompressed zip archive of .npy files, which are streamed."""

from __future__ import annotations

import itertools
import json
import zipfile
from typing import IO, Any

import numpy as np

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import ByteProgress
from ckpt.tools.step_contents import Contents, as_raw

_MAX_NAME_BYTES = (1 << 16) - 1
_COMPANIONS = ("__values__", "__tied__", "__dtypes__")


def write(contents: Contents, path: str, advance: ByteProgress) -> list[str]:
    """Write the file; return the names of the arrays that it has as plain integers."""
    names = {*_COMPANIONS, *(array.name for array in contents.arrays)}
    for array in contents.arrays:
        if array.name in _COMPANIONS or "\0" in array.name:
            raise CkptError(f"npz can't have a leaf with the name {array.name!r}; choose another format")
        if len(f"{array.name}.npy".encode()) > _MAX_NAME_BYTES:
            raise CkptError(
                f"npz has at most {_MAX_NAME_BYTES:,} bytes for a name, and leaf {array.name[:40]}… has more; choose another "
                "format"
            )
        if array.name.endswith(".npy") and (other := array.name.removesuffix(".npy")) in names:
            raise CkptError(f"numpy.load would return {other} for {array.name!r} of an npz file; choose another format")
    raw = {a.name: a.dtype for a in contents.arrays if not a.is_numpy}
    with zipfile.ZipFile(path, "w") as archive:
        for array, pieces in itertools.groupby(contents.read(), key=lambda piece: piece.array):
            dtype, shape = array.raw if array.name in raw else (array.numpy, array.shape)
            with _open_entry(archive, array.name) as file:
                _write_header(file, dtype, shape)
                for _, _, data in pieces:
                    file.write(np.ascontiguousarray(as_raw(data)).data)  # zipfile accepts only plain integers
                    advance(data.nbytes)
        for name, value in zip(_COMPANIONS, (contents.values, contents.tied, raw), strict=True):
            if value:
                with _open_entry(archive, name) as file:
                    np.lib.format.write_array(file, np.array(json.dumps(value)), allow_pickle=False)
    return list(raw)


def _open_entry(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True)


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        np.lib.format.write_array_header_1_0(file, header)
    except ValueError:  # the header is too long for version 1.0: a record type with very many fields
        np.lib.format.write_array_header_2_0(file, header)
