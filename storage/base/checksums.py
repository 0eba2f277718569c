"""Checksums of what is moved and kept: xxh3 everywhere, in cells, so that a part can be checked alone."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

CELL_BYTES = 256 << 10

checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""64 bits, for stored bytes and cells."""


def transfer_digest(data: Any) -> bytes:
    """128 bits of bytes on their way."""
    return xxhash.xxh3_128_digest(data)


def cell_checksums(data: memoryview) -> bytes:
    """The checksums of the cells of `data`, 8 bytes each, little-endian."""
    return pack_checksums([checksum(data[start : start + CELL_BYTES]) for start in range(0, len(data), CELL_BYTES)])


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Those of cells, as they are kept."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def find_bad_cells(data: memoryview, expected: bytes) -> list[int]:
    """The numbers of the cells of `data` that are not as they were; all of them where the number of cells differs."""
    found = cell_checksums(data)
    if len(found) != len(expected):
        return list(range(len(found) // 8))
    return [i // 8 for i in range(0, len(found), 8) if found[i : i + 8] != expected[i : i + 8]]
