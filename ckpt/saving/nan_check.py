"""Finds NaN in staged blocks, in the background, which costs little compared with the digest.

Every element of a small piece is checked. In a large piece, only some windows are checked: training that diverges turns whole
tensors into NaN, and a few windows find that. A single NaN between the windows is not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from ckpt.state.leaves.base import Bytes

NanOption = Literal["warn", "refuse", "allow"]
"""What to do about a NaN: log one warning, refuse the save, or do not check."""

FULL_CHECK_BYTES = 64 << 10
"""The largest piece in bytes of which every element is checked."""
WINDOW_BYTES = 4 << 10
WINDOWS = 16
"""The number of checked windows of a larger piece, which include its first and its last bytes."""
_CHUNK_BYTES = 256 << 10


class _FloatFormat(NamedTuple):
    """How to recognise a NaN by its bits: as an unsigned integer without the sign bit, it is greater than `limit`."""

    bits: str
    limit: int


_FLOAT_FORMATS = {
    "float16": _FloatFormat("<u2", 0xF800),
    "bfloat16": _FloatFormat("<u2", 0xFF00),
    "float32": _FloatFormat("<u4", 0xFF00_0000),
    "complex64": _FloatFormat("<u4", 0xFF00_0000),
    "float64": _FloatFormat("<u8", 0xFFE0_0000_0000_0000),
    "complex128": _FloatFormat("<u8", 0xFFE0_0000_0000_0000),
    "float8_e5m2": _FloatFormat("u1", 0xF8),
    "float8_e4m3fn": _FloatFormat("u1", 0xFC),
}
"""Limits are shifted left by one bit, as the numbers are, which drops the sign."""


class CheckedRange(NamedTuple):
    """Bytes that are checked in one call: a large piece of a block, or consecutive small pieces of one element type."""

    dtype: str
    begin: int
    end: int
    first: int
    """The index of the first piece."""
    last: int
    """The index of the last piece."""


def has_nan(data: Bytes, dtype: str) -> bool:
    """Return whether whole elements of a dtype, given as bytes, contain a NaN."""
    bits, limit = _FLOAT_FORMATS[dtype]
    numbers = data.view(bits)
    one = numbers.dtype.type(1)
    step = _CHUNK_BYTES // numbers.itemsize
    return any(int(np.max(numbers[at : at + step] << one)) > limit for at in range(0, len(numbers), step))


def has_nan_in_windows(data: Bytes, dtype: str) -> bool:
    """Return whether the windows of a large piece contain a NaN."""
    bits, limit = _FLOAT_FORMATS[dtype]
    numbers = data.view(bits)
    length = WINDOW_BYTES // numbers.itemsize
    step = (len(numbers) - length) // (WINDOWS - 1)
    strides = (step * numbers.itemsize, numbers.itemsize)
    spread = np.lib.stride_tricks.as_strided(numbers, (WINDOWS, length), strides, writeable=False)
    return max(int(np.max(spread << numbers.dtype.type(1))), int(np.max(numbers[-length:] << numbers.dtype.type(1)))) > limit


def checked_ranges(pieces: Sequence[tuple[str, int, int]]) -> list[CheckedRange]:
    """Return the ranges of a block to check, given dtype, first byte and end of each of its pieces."""
    found: list[CheckedRange] = []
    small_pieces: tuple[str, int, int] | None = None  # dtype, first byte and index of the first of consecutive small pieces
    for number, (dtype, begin, end) in enumerate([*pieces, ("", 0, 0)]):
        small = end - begin <= FULL_CHECK_BYTES
        if small_pieces is not None and not (small and dtype == small_pieces[0]):
            found.append(CheckedRange(*small_pieces[:2], pieces[number - 1][2], small_pieces[2], number - 1))
            small_pieces = None
        if dtype not in _FLOAT_FORMATS or begin == end:
            continue
        if not small:
            found.append(CheckedRange(dtype, begin, end, number, number))
        elif small_pieces is None:
            small_pieces = dtype, begin, number
    return found


def first_nan(data: Bytes, pieces: Sequence[tuple[str, int, int]], ranges: Sequence[CheckedRange]) -> int | None:
    """Return the index of the first piece of a block in which a NaN is found, or None."""
    for dtype, begin, end, first, last in ranges:
        if end - begin > FULL_CHECK_BYTES and first == last:
            if has_nan_in_windows(data[begin:end], dtype):
                return first
        elif has_nan(data[begin:end], dtype):  # gaps between pieces are zero
            while first < last:
                middle = (first + last) // 2
                if has_nan(data[pieces[first][1] : pieces[middle][2]], dtype):
                    last = middle
                else:
                    first = middle + 1
            return first
    return None


CheckedBlocks = dict[int, tuple[list[tuple[str, int, int]], list[CheckedRange]]]
"""The pieces and the checked ranges of each block, by its index."""

_recent: list[tuple[object, CheckedBlocks]] = []
"""The blocks of the last two plans with their ranges, the newest first. No lock: a thread that misses one makes it again."""


def checked_ranges_of_plan(blocks: object) -> CheckedBlocks:
    """Return the remembered ranges of the blocks of a plan: a training loop saves the same plan again and again."""
    for remembered_blocks, ranges in _recent:
        if remembered_blocks is blocks:
            return ranges
    ranges = {}
    _recent.insert(0, (blocks, ranges))
    del _recent[2:]
    return ranges
