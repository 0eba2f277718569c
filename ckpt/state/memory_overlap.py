"""Find arrays that share memory, from their addresses and strides alone; no element is read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ckpt.state.leaves.base import MemoryLayout

T = TypeVar("T")
K = TypeVar("K")

_MAX_WORK = 1 << 20
"""The most steps of numpy's search for a common byte; ordinary views need a few."""


class AddressRange(NamedTuple, Generic[K]):
    """The addresses of one array."""

    begin: int
    axes: list[tuple[int, int]]
    """Step in bytes and length of each axis that is longer than 1, the widest step first."""
    memory: MemoryLayout
    key: K
    """The caller's name for the array."""

    def end(self) -> int:
        """Return the address after the last byte."""
        return self.begin + sum(step * (n - 1) for step, n in self.axes) + self.memory.itemsize

    def overlaps_itself(self) -> bool:
        """Return whether two elements may share memory, as in an expanded view.

        They may if the step of an axis is smaller than the extent of the axes with smaller steps.
        """
        extent = self.memory.itemsize
        for step, n in reversed(self.axes):
            if step < extent:
                return True
            extent += step * (n - 1)
        return False


def address_range_of(memory: MemoryLayout, key: K) -> AddressRange[K]:
    """Return the address range of an array that has elements."""
    steps = [(s, n) for s, n in zip(memory.strides, memory.shape, strict=True) if n > 1]
    begin = memory.start + sum(s * (n - 1) for s, n in steps if s < 0)
    return AddressRange(begin, sorted(((abs(s), n) for s, n in steps), reverse=True), memory, key)


def overlapping_pairs(spans: Sequence[AddressRange[K]]) -> Iterator[tuple[AddressRange[K], AddressRange[K]]]:
    """Yield the pairs of spans that have a byte in common, or for which the search takes too long. spans: all of one device."""
    return ((a, b) for a, b in _candidate_pairs(spans) if _share_memory(a.memory, b.memory))


def overlapping_groups(ranges: Sequence[tuple[int, int, T]]) -> list[list[T]]:
    """Return the groups of two or more items whose ranges overlap, directly or through other items.

    ranges: (first byte, address after the last byte, item).
    """
    begin = np.array([begin for begin, _, _ in ranges], np.int64)
    end = np.array([end for _, end, _ in ranges], np.int64)
    order = np.argsort(begin)
    separate = begin[order][1:] >= np.maximum.accumulate(end[order])[:-1]
    if np.all(separate):
        return []
    cuts = [0, *(np.flatnonzero(separate) + 1).tolist(), len(ranges)]
    return [[ranges[i][2] for i in order[a:b]] for a, b in itertools.pairwise(cuts) if b - a > 1]


def _candidate_pairs(spans: Sequence[AddressRange[K]]) -> Iterator[tuple[AddressRange[K], AddressRange[K]]]:
    """Yield the pairs that may share memory: all that do, and few others."""
    for run in overlapping_groups([(span.begin, span.end(), span) for span in spans]):
        low = min(span.begin for span in run)
        step = max(span.axes[0][0] if span.axes else 0 for span in run)
        within, across = [], []
        for span in run:
            # Columns of one matrix lie side by side within each row of `step` bytes, so compare them there.
            axes = span.axes[1:] if span.axes and span.axes[0][0] == step else span.axes
            in_row = span._replace(begin=(span.begin - low) % step if step else 0, axes=axes)
            if step and in_row.end() <= step:
                within.append(in_row)
            else:
                across.append(span)
        yield from itertools.combinations(across, 2)
        yield from itertools.product(across, within)
        yield from _candidate_pairs(within)


def covers(outer: MemoryLayout, inner: MemoryLayout) -> bool:
    """Return whether all elements of `inner` are in `outer`: if they are the same, or if `outer` is contiguous around them.

    Both have elements. A view with gaps counts as covering nothing but itself.
    """
    if outer == inner:
        return True
    a, b = address_range_of(outer, None), address_range_of(inner, None)
    is_contiguous = math.prod(outer.shape) * outer.itemsize == a.end() - a.begin and not a.overlaps_itself()
    return outer.device == inner.device and is_contiguous and a.begin <= b.begin and b.end() <= a.end()


class _ArrayInterface:
    """An array for numpy to compare by address; its elements are never read, since the memory may be on a device."""

    def __init__(self, memory: MemoryLayout) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{memory.itemsize}", "data": (memory.start, False),
            "shape": memory.shape, "strides": memory.strides,
        }  # fmt: skip


def _share_memory(a: MemoryLayout, b: MemoryLayout) -> bool:
    if a == b:
        return True
    try:
        return np.shares_memory(np.asarray(_ArrayInterface(a)), np.asarray(_ArrayInterface(b)), _MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
