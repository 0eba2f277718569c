"""Finds the elements of buffers that are in the state a second time in PerRank, so that each rank stores its own anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.state.leaves.base import Bytes, MemoryLayout, StridedElements
from ckpt.state.memory_overlap import address_range_of, covers
from ckpt.state.tree import FlatState


@dataclass(frozen=True, slots=True)
class WrappedPart:
    """The elements of a buffer that PerRank has, too."""

    memory: MemoryLayout
    """The memory of the buffer."""
    ranges: Sequence[tuple[int, int]]
    """The address ranges of the wrapped arrays, as first byte and end. They include the gaps of arrays with strides."""
    is_whole: bool
    """Whether all elements of the buffer are wrapped."""

    def unwrapped_bytes(self, data: Bytes) -> Bytes:
        """Return a copy of the bytes of the buffer, with zeros for the elements in `ranges`."""
        found = data.copy()
        elements = found.reshape(-1, self.memory.itemsize)
        for first in range(0, len(elements), _CHUNK_ELEMENTS):
            part = elements[first : first + _CHUNK_ELEMENTS]
            part[self._is_wrapped(np.arange(first, first + len(part), dtype=np.int64))] = 0
        return found

    def unwrapped_sample(self, data: bytes, elements: StridedElements) -> bytes:
        """Return the sampled elements `data` with zeros for those in `ranges`."""
        indices = elements.indices()
        found = np.frombuffer(bytearray(data), np.uint8).reshape(len(indices), -1)
        found[self._is_wrapped(indices)] = 0
        return found.tobytes()

    def _is_wrapped(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each element, by its index in C order, whether it is in one of the ranges."""
        memory = self.memory
        addresses = np.full(len(indices), memory.start, np.int64)
        for at, stride in zip(np.unravel_index(indices, memory.shape), memory.strides, strict=True):
            addresses += at * stride
        found = np.zeros(len(indices), np.bool_)
        for begin, end in self.ranges:
            found |= (addresses + memory.itemsize > begin) & (addresses < end)
        return found


_CHUNK_ELEMENTS = 1 << 18
"""The elements whose addresses are computed at a time, so that a large buffer needs little memory."""


def wrapped_buffers(flat: FlatState) -> dict[str, WrappedPart]:
    """Return the buffers that share memory with arrays in PerRank, by name."""
    wrapped: dict[str, list[MemoryLayout]] = {}  # by the group of the alias notes
    for name in flat.per_rank & flat.aliases.keys():
        if (memory := flat.leaves[name].whole_memory()) is not None:
            wrapped.setdefault(flat.aliases[name].group, []).append(memory)
    found: dict[str, WrappedPart] = {}
    for name in flat.buffers - flat.per_rank if wrapped else ():
        layouts = wrapped.get(flat.aliases[name].group, []) if name in flat.aliases else []
        if layouts and (memory := flat.leaves[name].whole_memory()) is not None:
            ranges = [(span.begin, span.end()) for span in (address_range_of(layout, None) for layout in layouts)]
            found[name] = WrappedPart(memory, ranges, any(covers(layout, memory) for layout in layouts))
    return found
