"""What the pipelines need of an array, whatever framework it belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.state.boxes import SINGLE_REPLICA, Box, Replica, whole_box

Bytes = npt.NDArray[np.uint8]


class LeafShard(NamedTuple):
    """A shard: a box of a leaf's global array, in memory of exactly its shape."""

    leaf: ArrayLeaf
    box: Box
    replica: Replica = SINGLE_REPLICA


class MemoryLayout(NamedTuple):
    """Where the elements of an array lie and how its bytes are read. Two arrays are the same array where all of it is equal."""

    device: str
    start: int
    """Address of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    dtype: str
    """Its stored name, with the byte order."""
    view: str = ""
    """What turns the bytes into the elements: "conj" and "neg" of a lazy view of torch."""


class StridedElements(NamedTuple):
    """Some elements of an array in C order: runs of equal length at equal distances."""

    runs: int
    run_length: int
    """Elements of each run."""
    stride: int
    """Elements from the beginning of one run to that of the next."""
    stride_bytes: int
    run_type: np.dtype[Any]
    """A run as one numpy element."""

    def take_from(self, data: Bytes) -> bytes:
        """Those elements of the bytes of an array."""
        return np.ndarray((self.runs,), self.run_type, data, 0, (self.stride_bytes,)).tobytes()

    def indices(self) -> npt.NDArray[np.int64]:
        """The numbers of the elements."""
        starts = np.arange(self.runs, dtype=np.int64)[:, np.newaxis] * self.stride
        return np.asarray(starts + np.arange(self.run_length, dtype=np.int64)).reshape(-1)


class ArrayLeaf(ABC):
    """An array as bytes in C order: read by a save, written by a load.

    `flat` is its memory where that is on the host and contiguous (uint8, one axis): the pipelines then copy without
    asking. Otherwise they call `read` and `write` with boxes.
    """

    kind: ClassVar[str]

    __slots__ = ("dtype", "flat", "itemsize", "nbytes", "shape", "value")

    value: Any
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    """Of all elements."""
    flat: Bytes | None

    @abstractmethod
    def read(self, box: Box, out: Bytes) -> None:
        """Copy the elements of `box`, in C order, to `out` (as many bytes)."""

    @abstractmethod
    def write(self, box: Box, data: Bytes) -> None:
        """Set the elements of `box` from `data`, in C order."""

    def identity(self) -> Hashable | None:
        """Equal for two leaves that are the same array: tied weights. None where no other leaf can be the same."""
        memory = self.memory_layout()
        return None if memory is None else (self.kind, memory)

    def address(self) -> int | None:
        """That of the user's array where `flat` is its memory and something may change it, else None.

        It spares `memory` in most states, where no two of these ranges meet.
        """
        return None

    def memory_layout(self) -> MemoryLayout | None:
        """Where the elements of the user's array lie, to which `write` of a target puts them; None where no other array can
        share them."""
        return None

    def attributes(self) -> dict[str, Any]:
        """What else must be kept to make the same object again, as JSON."""
        return {}

    def version(self) -> int | None:
        """A number that grows with each in-place change, where the framework counts them."""
        return None

    def is_frozen(self) -> bool:
        """Whether nothing can ever change these bytes, so that a save may read them later."""
        return False

    def is_on_cuda(self) -> bool:
        """Whether the bytes come from a CUDA device, to which page-locked memory is much nearer."""
        return False

    def shards(self) -> list[LeafShard] | None:
        """The shards of a global array that this leaf stands for; None where it is all there, in this memory."""
        return None

    def full_copy(self) -> ArrayLeaf | None:
        """The leaf with all elements of the array, where other ranks with this name should have an equal copy; else None."""
        return self if self.shards() is None else None

    @classmethod
    def read_elements(cls, leaves: Sequence[tuple[Any, StridedElements]]) -> list[bytes]:
        """The bytes of some elements of leaves of this class, for each leaf."""
        found = []
        for leaf, elements in leaves:
            data = np.empty(leaf.nbytes, np.uint8)
            leaf.read(whole_box(leaf.shape), data)
            found.append(elements.take_from(data))
        return found

    def finish(self) -> Any:
        """The user's object, after a load has written all of it."""
        return self.value

    def target(self) -> ArrayLeaf:
        """The leaf that a load should write to when this one stands in `like`; raise TypeError where there is none.

        Its `finish` gives the very `value` of this leaf where it is filled in place, else a new object.
        """
        return self
