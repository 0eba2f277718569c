"""xxh3 checksums of stored and transferred bytes, by cells, so that a part can be verified alone."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ckpt.storage.base.store import Buffer

CELL_BYTES = 256 << 10
"""Bytes of a cell. The manifest of a step and the records of a namespace have a checksum of each cell, so that one cell can
be read and verified alone."""

checksum: Callable[[Buffer | npt.NDArray[np.uint8]], int] = xxhash.xxh3_64_intdigest  # type: ignore[assignment]
"""Returns the 64-bit checksum of stored bytes or of a cell."""


def transfer_digest(data: Buffer) -> bytes:
    """Return the 128-bit checksum of transferred bytes."""
    return xxhash.xxh3_128_digest(data)


def cell_checksums(data: memoryview) -> bytes:
    """Return the checksums of the cells of `data`, 8 bytes each, little-endian."""
    return pack_checksums([checksum(data[start : start + CELL_BYTES]) for start in range(0, len(data), CELL_BYTES)])


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Return checksums of cells in the stored form: 8 bytes each, little-endian."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def find_bad_cells(data: memoryview, expected: bytes) -> list[int]:
    """Return the numbers of the cells of `data` that do not match `expected`; all cells if their number differs."""
    found = cell_checksums(data)
    if len(found) != len(expected):
        return list(range(len(found) // 8))
    return [i // 8 for i in range(0, len(found), 8) if found[i : i + 8] != expected[i : i + 8]]
