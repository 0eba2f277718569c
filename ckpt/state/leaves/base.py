"""`ArrayLeaf`, the interface that every framework's arrays have for saves and loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from ckpt.state.boxes import SINGLE_REPLICA, Box, Replica, whole_box

Bytes = npt.NDArray[np.uint8]


class LeafShard(NamedTuple):
    """A shard of a leaf: a box of its global array. `leaf` is the local memory, with exactly the shape of the box."""

    leaf: ArrayLeaf
    box: Box
    replica: Replica = SINGLE_REPLICA


class MemoryLayout(NamedTuple):
    """Where the elements of an array lie and how to read them. Two arrays with equal layouts are the same array."""

    device: str
    start: int
    """Address of the first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, one for each axis."""
    itemsize: int
    """Bytes of one element."""
    dtype: str
    """The stored name, which includes the byte order."""
    view: str = ""
    """What turns the bytes into the elements: "conj" and "neg" for lazy views of torch."""


class StridedElements(NamedTuple):
    """A selection of elements of a flattened array: runs of equal length at equal distances."""

    runs: int
    """The number of runs."""
    run_length: int
    """Elements in each run."""
    stride: int
    """Elements from the start of one run to the start of the next."""
    stride_bytes: int
    """The stride in bytes."""
    run_type: np.dtype[Any]
    """A numpy dtype of which one element is a run."""

    def take_from(self, data: Bytes) -> bytes:
        """Return the selected elements of `data`, the bytes of a whole array in C order."""
        return np.ndarray((self.runs,), self.run_type, data, 0, (self.stride_bytes,)).tobytes()

    def indices(self) -> npt.NDArray[np.int64]:
        """Return the indices of the selected elements in the flattened array."""
        starts = np.arange(self.runs, dtype=np.int64)[:, np.newaxis] * self.stride
        return np.asarray(starts + np.arange(self.run_length, dtype=np.int64)).reshape(-1)


class LeafPiece(NamedTuple):
    """A box of a leaf, and host memory for the bytes of its elements, in C order."""

    leaf: ArrayLeaf
    box: Box
    data: Bytes


class Transfer(Protocol):
    """Copies from an accelerator that run while the program continues; a CUDA stream is one."""

    def synchronize(self) -> object:
        """Wait until all copies that were begun are done."""


class ArrayLeaf(ABC):
    """An array as bytes in C order: a save reads them, a load writes them.

    `flat` is the memory of the array (uint8, one axis) if it is contiguous and on the host: saves and loads then copy
    directly. Otherwise it is None, and they call `read` and `write` with boxes.
    """

    kind: ClassVar[str]
    """Which file makes the array in a load without `like`: numpy, scalar, bytes, or the name of a framework's file."""

    __slots__ = ("dtype", "flat", "itemsize", "nbytes", "shape", "value")

    value: Any
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    """Bytes of all elements; of a sharded leaf, of the local shards."""
    flat: Bytes | None

    @abstractmethod
    def read(self, box: Box, out: Bytes) -> None:
        """Copy the elements of `box`, in C order, to `out`, which has the same number of bytes."""

    @classmethod
    def start_reads(cls, pieces: Sequence[LeafPiece]) -> list[Transfer]:
        """Begin to read each piece, as `read` does. Return the transfers to wait for. All leaves are of this class."""
        for leaf, box, out in pieces:
            leaf.read(box, out)
        return []

    @classmethod
    def write_pieces(cls, pieces: Sequence[LeafPiece]) -> None:
        """Set the elements of each piece from its bytes, as `write` does. All leaves are of this class."""
        for leaf, box, data in pieces:
            leaf.write(box, data)

    @abstractmethod
    def write(self, box: Box, data: Bytes) -> None:
        """Set the elements of `box` from `data`, in C order."""

    def require_data(self) -> None:  # noqa: B027  most leaves have data
        """Raise TypeError for a leaf that stands for an array in `like` and has no data to save."""

    def identity(self) -> Hashable | None:
        """Return a key that is equal for two leaves of one array (tied leaves); None if no other leaf can be the same."""
        memory = self.memory_layout()
        return None if memory is None else (self.kind, memory)

    def address(self) -> int | None:
        """Return the address of the user's array if `flat` is its memory and other code may change it, else None.

        It makes calls of `memory_layout` unnecessary in most states, where no two of these address ranges overlap.
        """
        return None

    def memory_layout(self) -> MemoryLayout | None:
        """Return the layout of the user's array, to which a target's `write` copies; None if no other array can share it."""
        return None

    def whole_memory(self) -> MemoryLayout | None:
        """Return `memory_layout`, also of a shard that is the whole array; None if this process has only parts of it."""
        return self.memory_layout()

    def attributes(self) -> Mapping[str, str | bool]:
        """Return what else a load needs to make the same object, as JSON."""
        return {}

    def version(self) -> int | None:
        """Return a number that grows with each in-place change; None if the framework does not count changes."""
        return None

    def is_immutable(self) -> bool:
        """Return whether nothing can ever change these bytes, so that a save may read them later."""
        return False

    def cuda_device(self) -> Any:
        """Return the CUDA device that has the bytes, or None. Copies from it to page-locked memory are much faster."""
        return None

    def shards(self) -> list[LeafShard] | None:
        """Return the local shards of a global array; None if this leaf has the whole array in its memory."""
        return None

    def layout(self) -> str:
        """Return how the ranks have divided the array among them, "" where each has all of it.

        Two leaves with one layout are divided in the same way.
        """
        return ""

    def full_copy(self) -> ArrayLeaf | None:
        """Return the leaf with all elements of the array if other ranks should have an equal copy of it, else None."""
        return self if self.shards() is None else None

    @classmethod
    def read_elements(cls, leaves: Sequence[tuple[Self, StridedElements]]) -> list[bytes]:
        """Return the bytes of the selected elements of each leaf; all leaves are of this class."""
        found = []
        for leaf, elements in leaves:
            data = np.empty(leaf.nbytes, np.uint8)
            leaf.read(whole_box(leaf.shape), data)
            found.append(elements.take_from(data))
        return found

    def finish(self) -> Any:
        """Return the user's object, after a load has written all of its bytes."""
        return self.value

    def target(self) -> ArrayLeaf:
        """Return the leaf to which a load writes for this leaf of `like`; raise TypeError if it cannot be filled.

        The target's `finish` returns this leaf's `value` if it is filled in place, else a new object.
        """
        return self


LAUNCH_BYTES = 256 << 10
"""About how many bytes the bus of an accelerator moves while Python launches the next copy."""


def is_limited_by_launches(first: ArrayLeaf, nbytes: int, pieces: int) -> bool:
    """Return whether copies of small leaves take as long as Python needs to launch them; then one thread is the fastest.

    Python launches one copy at a time, so more threads would only wait for each other.

    first: one of the leaves. nbytes, pieces: the size and the number of all copies.
    """
    return first.flat is None and nbytes < LAUNCH_BYTES * pieces


def start_reads(pieces: Iterable[LeafPiece]) -> list[Transfer]:
    """Begin to read each piece. Return the transfers to wait for."""
    return [transfer for kind, those in _by_class(pieces) for transfer in kind.start_reads(those)]


def write_pieces(pieces: Iterable[LeafPiece]) -> None:
    """Set the elements of each piece from its bytes."""
    for kind, those in _by_class(pieces):
        kind.write_pieces(those)


def _by_class(pieces: Iterable[LeafPiece]) -> Iterable[tuple[type[ArrayLeaf], list[LeafPiece]]]:
    found: dict[type[ArrayLeaf], list[LeafPiece]] = {}
    for piece in pieces:
        found.setdefault(type(piece.leaf), []).append(piece)
    return found.items()
