"""Copy a raw block to its destinations in chunks that stay in the processor's cache."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ckpt.block_io.read_plan import Destination, PieceCells
from ckpt.format.digest import CELL_BYTES
from ckpt.state.leaves.base import Bytes

CHUNK_BYTES = 2 * CELL_BYTES
"""Bytes of a chunk that is in memory already: small enough to be in the processor's cache when it is hashed and copied."""

ReadRange = Callable[[int, int, Bytes | None], Bytes]
"""A function (begin, end, target) that returns the bytes [begin, end) of a raw block, valid until the next call.

target: the memory for these bytes if they belong to one destination, else None. A source that reads into it returns it."""

S = TypeVar("S", Destination, PieceCells)


class RangeSweep(Generic[S]):
    """Iterates over ranges of a block in ascending order. A range has the fields `begin` and `end`."""

    def __init__(self, byte_ranges: Iterable[S]) -> None:
        self._waiting: deque[S] = deque(sorted(byte_ranges, key=operator.attrgetter("begin")))
        self._reached: list[S] = []

    def advance_to(self, end: int) -> list[S]:
        """Return the ranges that begin before `end` and did not end before the `end` of the previous call."""
        while self._waiting and self._waiting[0].begin < end:
            self._reached.append(self._waiting.popleft())
        found = self._reached
        self._reached = [byte_range for byte_range in found if byte_range.end > end]
        return found


def longest_part(chunk_bytes: int) -> int:
    """Return the most bytes that `copy_in_chunks` reads at once."""
    return chunk_bytes * 3 // 2


def copy_in_chunks(
    begin: int, end: int, destinations: list[Destination], source: ReadRange, check: Callable[[Bytes, int], object],
    chunk_bytes: int = CHUNK_BYTES,
) -> None:  # fmt: skip
    """Copy bytes [begin, end) of a raw block to destinations, in chunks.

    check: called with each chunk, in order, and its position in the raw block.
    chunk_bytes: a multiple of CELL_BYTES.
    """
    sweep = RangeSweep(destinations)
    while begin < end:
        rest = end - begin
        # A short last chunk is merged into this one, since a short read would go through the page cache.
        upto = end if rest < longest_part(chunk_bytes) else begin + chunk_bytes
        parts = sweep.advance_to(upto)
        target = None
        if len(parts) == 1 and parts[0].begin <= begin and upto <= parts[0].end:
            first, _, memory = parts[0]
            target = memory[begin - first : upto - first]
        data = source(begin, upto, target)
        check(data, begin)
        if data is not target:
            for first, last, memory in parts:
                low, high = max(first, begin), min(last, upto)
                memory[low - first : high - first] = data[low - begin : high - begin]
        begin = upto
