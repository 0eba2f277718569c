"""Boxes of arrays: where one lies in another. Pure arithmetic on tuples."""

from __future__ import annotations

import math
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of an array: `shape` elements from `offset` on, along each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The box as an index into its array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def moved(self, by: tuple[int, ...]) -> Box:
        """The same box further along each axis."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, outer: Box) -> Box:
        """The same box counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


def whole_box(shape: tuple[int, ...]) -> Box:
    """The box that is all of an array of `shape`."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one array, or None."""
    low = tuple(max(p, q) for p, q in zip(a.offset, b.offset, strict=True))
    high = tuple(min(p + m, q + n) for p, m, q, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    extent = tuple(h - a for a, h in zip(low, high, strict=True))
    return Box(low, extent) if all(n > 0 for n in extent) else None


def contiguous_start(box: Box, shape: tuple[int, ...]) -> int | None:
    """First element of `box` in an array of `shape` in C order if its elements follow each other there, else None."""
    start, whole_below = 0, True
    for axis in range(len(shape) - 1, -1, -1):
        if not whole_below and box.shape[axis] != 1:
            return None
        whole_below = whole_below and box.shape[axis] == shape[axis]
    for offset, length in zip(box.offset, shape, strict=True):
        start = start * length + offset
    return start


class Replica(NamedTuple):
    """Which of several equal copies of a shard this rank holds."""

    number: int
    total: int
    ranks: tuple[int, ...] | None = None
    """The ranks that hold the copies, where known. All of them see the same shards with this value, so that they can
    divide all of those among them as one; where it is unknown they divide each shard by itself."""
    is_stored_whole: bool = False
    """Copy 0 is stored as a whole: the copies may differ, and a mixture of them would be a value that no rank had."""


SINGLE_REPLICA = Replica(0, 1)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of an array in C order as boxes, each contiguous, in that order.

    At most two boxes an axis: the end of a row, whole rows, the beginning of a row.
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
    """Cut an array into boxes of at most `block_bytes`, about equal, each contiguous in C order.

    One axis is cut; those before it are stepped through one index at a time, those after it stay whole.
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
