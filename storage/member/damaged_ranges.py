"""Ranges of an object with the checksums of their cells, and the search for the damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.storage.base.checksums import CELL_BYTES, find_bad_cells
from ckpt.storage.base.errors import StoreError, is_bad_sector
from ckpt.storage.base.store import Store


@dataclass(frozen=True, slots=True)
class ChecksummedRange:
    """A range of an object, and what its bytes must be."""

    position: int
    """Its first byte in the object."""
    nbytes: int
    """Its length in bytes."""
    cell_checksums: bytes
    """The checksum of each of its cells, 8 bytes each; see storage/base/checksums.py."""


def find_damaged_ranges(store: Store, name: str, ranges: Sequence[ChecksummedRange]) -> list[int]:
    """Return the indices of the ranges of an object that are damaged, or that the device cannot read.

    Raises NotFound, and StoreError if the store fails otherwise, which says nothing about the bytes.
    """
    bad = []
    step = 16 * CELL_BYTES
    buffer = memoryview(bytearray(step))
    with store.open(name) as reader:
        for number, each in enumerate(ranges):
            for start in range(0, each.nbytes, step):
                data = buffer[: min(step, each.nbytes - start)]
                try:
                    got = reader.read_into(each.position + start, data)
                except StoreError as error:
                    if not is_bad_sector(error):
                        raise
                    got = -1
                first = start // CELL_BYTES * 8
                sums = each.cell_checksums[first : first + -(-len(data) // CELL_BYTES) * 8]
                if got < len(data) or find_bad_cells(data, sums):
                    bad.append(number)
                    break
    return bad
