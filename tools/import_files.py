"""Arrays that lie in files of other programs, as leaves that a save reads block by block.

A state of such leaves is saved like any other: its memory does not depend on the size of the arrays.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.saving.tiling_check import are_tiled
from ckpt.state.boxes import Box, contiguous_start, intersect
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.storage.base.errors import CkptError, StoreError, first_line, transient_cause
from ckpt.storage.base.fd_io import describe_os_error

DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, EOFError,
    AssertionError, struct.error, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError,
)  # fmt: skip
"""What reading damaged or forged contents raises: parts are missing, or have other types or values. torch asserts some."""


@contextmanager
def refuse_damage(where: object, advice: str) -> Iterator[None]:
    """Raise CkptError with the place and the advice where the body raises one of `DAMAGE`."""
    try:
        yield
    except CkptError:
        raise
    except DAMAGE as error:
        raise_if_unreadable(error, str(where))
        raise CkptError(f"{where} is damaged ({type(error).__name__}: {first_line(error)[:100]}): {advice}") from error


def read_pointer(path: Path) -> str:
    """Return the text of a small file that names the newest checkpoint. Raises CkptError if it is not text."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CkptError(f"{path} can't be read as text ({error}): copy it again, or name the checkpoint itself") from error


def list_folder(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder whose names match a pattern, in order. Raises CkptError if the folder can't be listed.

    `Path.glob` would return nothing then, and what is there would be left out.
    """
    try:
        return sorted(folder / name for name in os.listdir(folder) if fnmatchcase(name, pattern))
    except OSError as error:
        raise CkptError(f"{folder} can't be listed: {describe_os_error(error)}") from error


_MAX_UNNAMED_ITEMS = 1 << 16
"""By how many items a list may be longer than the names of its state: empty containers and items that --only leaves out."""


def insert(root: dict[Any, Any] | list[Any], keys: Sequence[Any], value: object, names: int) -> None:
    """Put a value into nested dicts and lists, and make those that are missing; an int is the index of a list.

    names: how many values the state has, which limits the length of its lists.

    Raises ValueError if another value has these keys, or the first of them.
    """
    node: Any = root
    for i, key in enumerate(keys):
        is_last = i + 1 == len(keys)
        if isinstance(node, list):
            if type(key) is not int or not 0 <= key < names + _MAX_UNNAMED_ITEMS:
                raise ValueError(f"{key!r:.60} is not an index of a list of the state")
            node.extend([None] * (key + 1 - len(node)))
            is_free = node[key] is None
        elif isinstance(node, dict):
            is_free = key not in node
        else:
            raise ValueError("its keys lead through another value")
        if not is_free and is_last:
            raise ValueError("it has the keys of another value")
        if is_free:
            node[key] = value if is_last else [] if isinstance(keys[i + 1], int) else {}
        node = node[key]


def raise_if_unreadable(error: Exception, where: str) -> None:
    """Raise StoreError if the error of a read says nothing about the bytes: the disk fails, or the process lacks memory."""
    if isinstance(error, RecursionError):  # contents that are nested too deeply
        return
    if (cause := transient_cause(error)) is not None:
        advice = "check the disk and the free memory, and try again"
        raise StoreError(f"reading {where} failed: {first_line(cause)}; {advice}") from error


@dataclass(frozen=True, slots=True)
class FileRegion:
    """An array in a file, by the offset of its first element and the distances of its elements."""

    path: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, one for each axis."""
    itemsize: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, in C order."""
        return self.strides == contiguous_strides(self.shape, self.itemsize)

    def read(self, box: Box, out: Bytes) -> None:
        """Copy the elements of a box, in C order, to `out`; raise CkptError if the file is shorter than it was."""
        if not out.size:
            return
        if not self.is_contiguous:
            self._read_strided(box, out)
            return
        start = contiguous_start(box, self.shape)
        if start is not None:
            _read_exactly(self.path, self.offset + start * self.itemsize, out)
            return
        step = out.size // box.shape[0]
        for i in range(box.shape[0]):
            row = Box((box.offset[0] + i, *box.offset[1:]), (1, *box.shape[1:]))
            self.read(row, out[i * step : (i + 1) * step])

    def _read_strided(self, box: Box, out: Bytes) -> None:
        try:
            with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                elements = np.dtype((np.void, self.itemsize))
                array: Any = np.ndarray(self.shape, elements, memory, self.offset, self.strides)
                np.copyto(out.view(elements).reshape(box.shape), array[(*box.slices(), ...)])
                del array  # otherwise the file can't be closed
        except (ValueError, TypeError, OverflowError) as error:
            raise CkptError(
                f"{self.path} ends before the array of shape {list(self.shape)} at byte {self.offset}: copy the file again"
            ) from error


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array in C order."""
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


def _read_exactly(path: str, offset: int, out: Bytes) -> None:
    view = out.data
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if not count:
                raise CkptError(f"{path} ends at byte {offset + done}, before an array that it describes: copy the file again")
            done += count
    finally:
        os.close(fd)


class FileLeaf(ArrayLeaf):
    """An array of one or more regions of files."""

    __slots__ = ("_attributes", "_regions", "kind")

    kind: str  # type: ignore[misc]

    def __init__(
        self, dtype: str, shape: Sequence[int], regions: Sequence[tuple[Box, FileRegion]], kind: str = "torch",
        attributes: Mapping[str, str | bool] | None = None,
    ) -> None:  # fmt: skip
        """kind: the kind of the array that a load without `like` makes: "torch" or "numpy". Its framework is not imported."""
        self.value = self
        self.kind = kind
        self.dtype = dtype
        self.shape = tuple(shape)
        if not all(isinstance(length, int) and 0 <= length < 1 << 63 for length in self.shape):
            raise CkptError(
                f"its shape is {str(list(self.shape))[:60]}, which no array has: copy all files of the checkpoint again"
            )
        self.itemsize = numpy_dtype(dtype).itemsize
        size = int(np.prod(self.shape, dtype=object))
        self.nbytes = size * self.itemsize
        self.flat = None
        self._regions = list(regions)
        self._attributes = attributes or {}
        if (covered := sum(box.size for box, _ in self._regions)) != size:
            raise CkptError(
                f"its parts have {covered} elements, and the array has {size}: copy all files of the checkpoint again"
            )
        if not _is_tiled(self.shape, [box for box, _ in self._regions if box.size]):
            raise CkptError("its parts overlap or reach beyond its shape: copy all files of the checkpoint again")

    @property
    def regions(self) -> list[tuple[Box, FileRegion]]:
        """The boxes of the array, each with its region."""
        return self._regions

    @property
    def single_region(self) -> FileRegion | None:
        """The region of an array that lies in one; None for one of several parts."""
        return self._regions[0][1] if len(self._regions) == 1 else None

    def read(self, box: Box, out: Bytes) -> None:
        if len(self._regions) == 1:
            self._regions[0][1].read(box, out)
            return
        elements = np.dtype((np.void, self.itemsize))
        target = out.view(elements).reshape(box.shape)
        for outer, region in self._regions:
            if (common := intersect(box, outer)) is not None:
                part = np.empty(common.size * self.itemsize, np.uint8)
                region.read(common.relative_to(outer), part)
                target[common.relative_to(box).slices()] = part.view(elements).reshape(common.shape)

    def write(self, box: Box, data: Bytes) -> None:
        raise AssertionError("an array in a file of another program is never written")

    def identity(self) -> Hashable | None:
        return ("file", self.dtype, self.shape, tuple(self._regions))

    def attributes(self) -> Mapping[str, str | bool]:
        return self._attributes


def _is_tiled(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether boxes cover an array, each element once."""
    if any(len(numbers) != len(shape) for box in boxes for numbers in box):
        return False
    if len(boxes) < 2 and all(box == Box((0,) * len(shape), shape) for box in boxes):
        return True
    edges = [(*column, n) for box in boxes for *column, n in zip(*box, shape, strict=True)]
    if any(offset < 0 or length < 0 or offset + length > n for offset, length, n in edges):
        return False
    offsets, lengths = (np.array([getattr(box, name) for box in boxes], np.int64) for name in ("offset", "shape"))
    return bool(are_tiled(np.array([shape], np.int64), np.array([0, len(boxes)]), offsets, lengths)[0])


def whole_file_leaf(
    region: FileRegion, dtype: str, kind: str = "torch", attributes: Mapping[str, str | bool] | None = None
) -> FileLeaf:
    """Return the leaf of an array that lies in one region."""
    try:
        return FileLeaf(dtype, region.shape, [(Box((0,) * len(region.shape), region.shape), region)], kind, attributes)
    except CkptError as error:
        raise CkptError(f"{region.path}, the array at byte {region.offset}: {error}") from error
