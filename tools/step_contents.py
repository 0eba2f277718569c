"""The contents of a step for the commands: arrays, plain values and ties by name, and array data in pieces.

Every writer of `ckpt-restore` reads by `Contents.read`, so the memory does not depend on the size of a leaf.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ckpt.block_io.read_plan import Target
from ckpt.errors import DAMAGE_ADVICE, LeafNotFound
from ckpt.repository.checkpoint import Checkpoint
from ckpt.state.boxes import Box
from ckpt.state.dtype_names import dtype_name, numpy_dtype
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.state.name_patterns import entries, matcher, require_match, suggest
from ckpt.state.rank_tree import own_name, own_ranks
from ckpt.state.tree import Node
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.tools.export_names import SAME_NAMES, ExportNames

PIECE_BYTES = 32 << 20
"""The size of a piece, a few blocks: large enough to read at the speed of the disk, small enough to be in memory twice."""
_MAX_AXES = 64
"""Of an array of numpy."""

Data = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a step."""

    name: str
    """Its name in the output: that of its leaf, or of a tied leaf if only that was chosen."""
    leaf: str
    """The name of its leaf in the step."""
    dtype: str
    """The element type, as ckpt names it."""
    shape: tuple[int, ...]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy type of its elements."""
        return numpy_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numpy.itemsize * math.prod(self.shape)

    @property
    def is_numpy(self) -> bool:
        """Whether the type is one of numpy, and not of ml_dtypes or torch."""
        return not hasattr(ml_dtypes, self.dtype) and dtype_name(self.numpy) == self.dtype

    @property
    def native(self) -> np.dtype[Any] | None:
        """The type in the byte order of this machine if it is a number type of numpy, otherwise None."""
        return self.numpy.newbyteorder("=") if self.is_numpy and self.numpy.kind in "biufc" else None

    @property
    def raw(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """The type and shape of the array as plain integers: of the same size, or bytes with one more axis.

        Raises CkptError if numpy has no arrays with one more axis.
        """
        nbytes = self.numpy.itemsize
        if nbytes in (1, 2, 4, 8):
            return np.dtype(f"u{nbytes}"), self.shape
        if len(self.shape) >= _MAX_AXES:
            raise CkptError(
                f"leaf {self.leaf} has {len(self.shape)} axes, and as bytes, which the format needs for its type {self.dtype}, "
                f"it would have one more: numpy has at most {_MAX_AXES}; choose another format, or leave it out with --only"
            )
        return np.dtype("u1"), (*self.shape, nbytes)


def as_raw(data: Data) -> Data:
    """Return the elements as plain integers, as `Array.raw` describes them."""
    nbytes = data.dtype.itemsize
    if nbytes in (1, 2, 4, 8):
        return data.view(f"u{nbytes}")
    if not nbytes:
        return np.empty((*data.shape, 0), np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).reshape(*data.shape, nbytes)


class ArrayPiece(NamedTuple):
    """A part of an array: the data of one box."""

    array: Array
    box: Box
    data: Data


@dataclass(frozen=True, slots=True)
class Contents:
    """The chosen arrays and values of a step."""

    checkpoint: Checkpoint
    tree: Node
    """The whole state tree of the step."""
    only: tuple[str, ...]
    """The patterns of the chosen names; empty for all."""
    names: ExportNames
    """How the names of the step become those of the output."""
    arrays: list[Array]
    tied: dict[str, str]
    """Further names of arrays: second name → `Array.name`."""
    values: dict[str, Any]
    """Plain values by name, as JSON; other types are nodes of docs/reference/format.md, such as {"bytes": …}."""
    own_ranks: dict[str, list[int]]
    """By name in the output: the ranks that have saved another value of an array than the one listed."""
    nodes: dict[str, Node]
    """The nodes of the chosen arrays (with their further names) and values, by name in the output."""

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays)

    def read(self) -> Iterator[ArrayPiece]:
        """Yield the verified data of all arrays in order, each in C order; an array without elements is one empty piece.

        Small arrays are read together, because they share blocks, so that each block is read once.
        """
        batch: list[Array] = []
        pending = 0
        for array in self.arrays:
            if array.nbytes > PIECE_BYTES:
                yield from self._read_batch(batch)
                batch, pending = [], 0
                yield from self._read_in_pieces(array)
                continue
            batch.append(array)
            pending += array.nbytes
            if pending >= PIECE_BYTES:
                yield from self._read_batch(batch)
                batch, pending = [], 0
        yield from self._read_batch(batch)

    def _read_batch(self, batch: list[Array]) -> Iterator[ArrayPiece]:
        buffers = [np.empty(a.shape, a.numpy) for a in batch]
        self.checkpoint.read([Target(a.leaf, NumpyLeaf(data), None) for a, data in zip(batch, buffers, strict=True)])
        for array, data in zip(batch, buffers, strict=True):
            yield ArrayPiece(array, Box((0,) * len(array.shape), array.shape), data)

    def _read_in_pieces(self, array: Array) -> Iterator[ArrayPiece]:
        lazy = self.checkpoint[array.leaf]
        for box in tile_boxes(array.shape, piece_shape(array.shape, array.numpy.itemsize)):
            yield ArrayPiece(array, box, lazy[box.slices()])


def read_contents(checkpoint: Checkpoint, only: Iterable[str] = (), names: ExportNames = SAME_NAMES) -> Contents:
    """Return the contents of a step, or the part that is chosen.

    only: patterns of saved names; empty for all.
    names: which of those names are exported, and the names that they get.

    Raises LeafNotFound for a pattern that matches nothing, CkptError if two leaves would get one name, and IntegrityError if an
    array has another number of bytes than its shape needs.
    """
    only = tuple(only)
    tree = checkpoint.tree()
    saved = checkpoint.saved()
    found = list(entries(tree))
    if only:
        require_match((path for path, _ in found), only, checkpoint.where)
    matches = matcher(only) if only else lambda _: True
    reader = _ContentsReader(checkpoint, names)
    seen: set[str] = set()
    for path, node in found:
        chosen = matches(path) and names.selects(path)
        if not (isinstance(node, dict) and "array" in node):
            if chosen:
                reader.add_value(path, node)
            continue
        leaf = node["array"]
        first = leaf not in seen
        seen |= {leaf, *(own_name(leaf, rank) for rank in own_ranks(node))}
        if chosen:
            reader.add_array(leaf, leaf if first else _unused_name(path, reader.tied_or_saved), node)
    for leaf in saved:  # arrays that `entries` does not list, such as those in a set
        if leaf not in seen and matches(leaf) and names.selects(leaf):
            reader.add_array(leaf, leaf, None)
    if names.strip and not reader.nodes:
        raise LeafNotFound(f"no chosen leaf of {checkpoint.where} begins with {names.strip!r}{suggest(names.strip, saved)}")
    checkpoint.manifest().select(reader.arrays).require_whole_leaves(checkpoint.where)
    return Contents(
        checkpoint=checkpoint,
        tree=tree,
        only=only,
        names=names,
        arrays=list(reader.arrays.values()),
        tied=reader.tied,
        values=reader.values,
        own_ranks=reader.own_ranks,
        nodes=reader.nodes,
    )


class _ContentsReader:
    """Collects the chosen entries of a step under the names that they get."""

    def __init__(self, checkpoint: Checkpoint, names: ExportNames) -> None:
        self._where = checkpoint.where
        self._saved = checkpoint.saved()
        self._names = names
        self._sources: dict[str, str] = {}  # by name in the export: the saved name
        self.arrays: dict[str, Array] = {}  # by name of the leaf
        self.tied: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.own_ranks: dict[str, list[int]] = {}
        self.nodes: dict[str, Node] = {}
        self.tied_or_saved = collections.ChainMap[str, Any]({}, self._saved)

    def add_array(self, leaf: str, source: str, node: Node) -> None:
        if leaf not in self._saved:
            raise IntegrityError(f"leaf {leaf} is in the tree of {self._where} but in none of its manifests; {DAMAGE_ADVICE}")
        name = self._new_name(source)
        if leaf in self.arrays:
            self.tied[name] = self.arrays[leaf].name
            self.tied_or_saved[source] = leaf
        else:
            self.arrays[leaf] = Array(name, leaf, self._saved[leaf].dtype, self._saved[leaf].shape)
        if node is not None:
            self._add_node(name, node)
            if ranks := own_ranks(node):
                self.own_ranks[name] = [*ranks]

    def add_value(self, path: str, node: Node) -> None:
        name = _unused_name(self._new_name(path), self.values)
        self.values[name] = _node_to_json(node)
        self._add_node(name, node)

    def _add_node(self, name: str, node: Node) -> None:
        self.nodes[_unused_name(name, self.nodes)] = node  # an array and a value may have one name

    def _new_name(self, source: str) -> str:
        if not self._names.changes:
            return source
        new = self._names(source)
        if self._sources.setdefault(new, source) != source:
            raise CkptError(
                f"--strip and --rename give {self._sources[new]} and {source} one name, {new}: change them, or leave one out "
                "with --only"
            )
        return new


def _unused_name(path: str, taken: Container[str]) -> str:
    while path in taken:  # two entries may have one name: {"a.b": x, "a": {"b": y}}
        path += "~"
    return path


def _node_to_json(node: Node) -> Any:
    if isinstance(node, dict):
        if node.get("dict") == []:
            return {}
        if node.get("tuple") == []:
            return []
    return node


# --- pieces ----------------------------------------------------------------------------------------------------


def piece_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of pieces of an array: contiguous in C order, at most PIECE_BYTES, and of nearly equal sizes."""
    piece = list(shape)
    for axis in range(len(shape)):
        if itemsize * math.prod(piece) <= PIECE_BYTES:
            break
        most = max(1, PIECE_BYTES // (itemsize * math.prod(piece[axis + 1 :])))
        piece[axis] = -(-piece[axis] // -(-piece[axis] // most))
    return tuple(piece)


def tile_boxes(shape: tuple[int, ...], piece: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes that tile an array, in C order."""
    starts = (range(0, length, extent) for length, extent in zip(shape, piece, strict=True))
    for offset in itertools.product(*starts):
        yield Box(offset, tuple(min(p, n - o) for p, n, o in zip(piece, shape, offset, strict=True)))


def check_paths(names: Iterable[str], format_name: str) -> None:
    """Raise CkptError for names that a format can't have together, because `/` in a name makes groups."""
    unique_names = set(names)
    for name in unique_names:
        parts = name.split("/")
        above = ("/".join(parts[:i]) for i in range(1, len(parts)))
        if (group := next((a for a in above if a in unique_names), None)) is not None:
            raise CkptError(
                f"{format_name} can't have both leaves {group} and {name}: '/' makes groups, so {group} would be a group and "
                "an array; choose another format, or one of the two with --only"
            )
        if any(not part.strip(".") or "\0" in part for part in parts):
            raise CkptError(
                f"{format_name} can't have a leaf with the name {name!r}; choose another format, or other leaves with --only"
            )
