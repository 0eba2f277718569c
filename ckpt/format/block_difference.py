"""The difference of a block to a base block: an earlier block of the same length, which is stored in full.

Elements are compared as integers of `width` bytes. For each of them, the difference has the signed distance from the element of
the base, as an unsigned number that is small for a small distance of either sign (zigzag: 0, -1, 1, -2 … become 0, 1, 2, 3 …).
Weights that a training step has hardly moved become numbers with many zero bytes, and a codec shrinks them. An exclusive or
would have more 1 bits, because a carry changes many bits. docs/reference/format.md specifies it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ckpt.state.leaves.base import Bytes

WIDTHS = (1, 2, 4, 8)

_CHUNK_BYTES = 128 << 10
"""Bytes that are computed at once, so that all steps of the computation find them in the processor's cache."""


class BaseBlock(NamedTuple):
    """The block from which a difference was computed. It is stored in full, and has as many raw bytes as the difference."""

    pack: str
    position: int
    stored: int
    """Bytes of the base in its pack."""
    codec: str | None
    digest: bytes
    """Digest of the raw base."""
    checksum: int | None
    """xxh3-64 of the stored bytes; None if those are the raw bytes."""
    width: int
    """Bytes of the integers as which the elements were compared: 1, 2, 4 or 8."""


def difference_width(itemsize: int, nbytes: int) -> int:
    """Return the width with which to compare blocks of `nbytes` bytes with elements of `itemsize` bytes."""
    return itemsize if itemsize in WIDTHS and nbytes % itemsize == 0 else 1


def subtract(block: Bytes, base: Bytes, width: int, out: Bytes) -> None:
    """Write the difference of `block` to `base` into `out`. All three have the same length, a multiple of `width`."""
    unsigned, signed = np.dtype(f"<u{width}"), np.dtype(f"<i{width}")
    sign = np.empty(_CHUNK_BYTES // width, signed)
    for begin in range(0, len(block), _CHUNK_BYTES):
        new, old, result = (data[begin : begin + _CHUNK_BYTES].view(unsigned) for data in (block, base, out))
        mask = sign[: len(new)]
        np.subtract(new, old, out=result)
        np.right_shift(result.view(signed), 8 * width - 1, out=mask)
        np.left_shift(result, 1, out=result)
        np.bitwise_xor(result, mask.view(unsigned), out=result)


def add(base: Bytes, difference: Bytes, width: int, out: Bytes) -> None:
    """Write into `out` the block whose difference to `base` is given. `out` may be `base` or `difference` itself."""
    unsigned = np.dtype(f"<u{width}")
    sign = np.empty(_CHUNK_BYTES // width, unsigned)
    for begin in range(0, len(base), _CHUNK_BYTES):
        old, change, result = (data[begin : begin + _CHUNK_BYTES].view(unsigned) for data in (base, difference, out))
        mask = sign[: len(old)]
        np.bitwise_and(change, 1, out=mask)
        np.negative(mask, out=mask)
        np.bitwise_xor(mask, np.right_shift(change, 1), out=mask)
        np.add(old, mask, out=result)
