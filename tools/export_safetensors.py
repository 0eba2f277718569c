"""Writes a step as a safetensors file: the length of a JSON header in 8 bytes, the header, and the arrays.

The library needs all arrays in memory at once. The format is simple enough to write it here, piece by piece.
"""

from __future__ import annotations

import json
import struct

import numpy as np

from ckpt.state.boxes import contiguous_start
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.store import ByteProgress
from ckpt.tools.step_contents import Array, Contents, as_raw

TYPE_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
HEADER_LIMIT = 100_000_000
"""The library refuses longer headers."""


def write(contents: Contents, path: str, advance: ByteProgress) -> list[str]:
    """Write the file; return the names of the arrays that it has as plain integers."""
    raw = {a.name: a.dtype for a in contents.arrays if type_code(a) is None}
    metadata = {"format": "pt", "step": str(contents.checkpoint.step)}  # transformers requires `format`
    for key, value in (("values", contents.values), ("tied", contents.tied), ("dtypes", raw)):
        if value:
            metadata[key] = json.dumps(value)
    write_file(contents, path, metadata, advance)
    return list(raw)


def write_file(contents: Contents, path: str, metadata: dict[str, str], advance: ByteProgress) -> None:
    """Write all arrays of `contents` as one file with this metadata."""
    types = {a.name: type_code(a) for a in contents.arrays}
    header: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    end = 0
    # Like the library, write large elements first, so that each array begins at a multiple of its element size.
    for array in sorted(contents.arrays, key=lambda a: -a.numpy.itemsize if types[a.name] else 0):
        if array.name == "__metadata__":
            raise CkptError("safetensors reserves the name __metadata__; restore this leaf in another format")
        code, shape = types[array.name] or f"U{8 * array.raw[0].itemsize}", array.shape
        if types[array.name] is None:
            shape = array.raw[1]
        starts[array.name] = end
        header[array.name] = {"dtype": code, "shape": shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CkptError(
            f"a safetensors header has at most {HEADER_LIMIT:,} bytes, and the names and values of this step need "
            f"{len(text):,}; choose another format, or fewer leaves with --only"
        )
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        base = file.tell()
        file.truncate(base + end)
        for array, box, data in contents.read():
            if types[array.name] is not None and array.native is not None:
                data = data.astype(array.native.newbyteorder("<"), copy=False)
            start = contiguous_start(box, array.shape) or 0
            file.seek(base + starts[array.name] + start * array.numpy.itemsize)
            file.write(np.ascontiguousarray(as_raw(data)).data)
            advance(data.nbytes)


def type_code(array: Array) -> str | None:
    """Return the code of the array's type, or None if the format does not have the type."""
    return TYPE_CODES.get(array.native.name if array.native is not None else array.dtype)
