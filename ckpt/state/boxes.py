"""Boxes, the rectangular parts of arrays: intersection, offsets and splits, as pure arithmetic on tuples."""

from __future__ import annotations

import math
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of an array: `shape` elements from `offset` on, along each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index into its array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def moved(self, by: tuple[int, ...]) -> Box:
        """Return the same box with its offset increased by `by` along each axis."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, outer: Box) -> Box:
        """Return the same box with its offset counted from that of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers all of an array of `shape`."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes of one array; None if they have no element in common."""
    low = tuple(max(p, q) for p, q in zip(a.offset, b.offset, strict=True))
    high = tuple(min(p + m, q + n) for p, m, q, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    extent = tuple(h - a for a, h in zip(low, high, strict=True))
    return Box(low, extent) if all(n > 0 for n in extent) else None


def contiguous_start(box: Box, shape: tuple[int, ...]) -> int | None:
    """Return the index of the first element of `box` in the flattened array; None if the box is not contiguous in C order.

    shape: that of the array.
    """
    start, whole_below = 0, True
    for axis in range(len(shape) - 1, -1, -1):
        if not whole_below and box.shape[axis] != 1:
            return None
        whole_below = whole_below and box.shape[axis] == shape[axis]
    for offset, length in zip(box.offset, shape, strict=True):
        start = start * length + offset
    return start


class Replica(NamedTuple):
    """Which of several equal copies of a shard this rank has."""

    number: int
    """The number of this copy, from 0."""
    total: int
    """The number of copies."""
    ranks: tuple[int, ...] | None = None
    """The ranks that have the copies, None where unknown. Ranks with the same value have the same shards, so they divide all of
    these among them at once; where it is unknown they divide each shard by itself."""
    is_stored_whole: bool = False
    """Only copy 0 is stored: the copies may differ, and a mixture of them would be a value that no rank had."""


SINGLE_REPLICA = Replica(0, 1)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the elements [start, stop) of the flattened array as boxes, each contiguous, in C order.

    Each axis adds at most two boxes: the end of a row before the whole rows, and the beginning of a row after them.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(first, flat_boxes(shape[1:], head, tail))
    found = []
    if head:
        found += _in_row(first, flat_boxes(shape[1:], head, row))
        first += 1
    if first < last:
        found.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        found += _in_row(last, flat_boxes(shape[1:], 0, tail))
    return found


def _in_row(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *b.offset), (1, *b.shape)) for b in boxes]


def split_into_boxes(shape: tuple[int, ...], itemsize: int, block_bytes: int) -> list[Box]:
    """Return boxes of about equal size and at most `block_bytes` bytes that cover an array, each contiguous in C order.

    One axis is split. The axes before it are iterated one index at a time; the axes after it stay whole.

    itemsize: bytes of one element, at most `block_bytes`.
    """
    row = itemsize * math.prod(shape)
    if row <= block_bytes:
        return [whole_box(shape)]
    axis = 0
    while (row := row // shape[axis]) > block_bytes:
        axis += 1
    pieces = -(-shape[axis] // (block_bytes // row))
    cuts = [shape[axis] * i // pieces for i in range(pieces + 1)]
    tail = (0,) * (len(shape) - axis - 1)
    boxes = []
    for flat in range(math.prod(shape[:axis])):
        head = []
        for length in reversed(shape[:axis]):
            flat, index = divmod(flat, length)
            head.append(index)
        lead = tuple(reversed(head))
        boxes += [
            Box((*lead, a, *tail), ((1,) * axis) + (b - a, *shape[axis + 1 :])) for a, b in zip(cuts, cuts[1:], strict=False)
        ]
    return boxes
