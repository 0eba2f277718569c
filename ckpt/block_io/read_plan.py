"""Plan the reads of a load: for each block, the byte ranges to read and where its pieces go. Pure.

If a load needs only parts of an uncompressed block, only the cells of those parts are read. *Raw* bytes are those of a decoded
block, *stored* bytes those in the pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpt.errors import DAMAGE_ADVICE
from ckpt.format.digest import CELL_BYTES
from ckpt.format.manifest import Manifest, Row
from ckpt.state.boxes import Box, contiguous_start, intersect
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.storage.base.errors import IntegrityError
from ckpt.support.runtime import collector_paused

_MAX_PARTIAL_SHARE = 0.8
"""The cells of several pieces are read if they are at most this fraction of the block; else the whole block is read."""


_XXH3_DIGEST_BYTES = 16
"""A longer digest is blake3. Such a block is always read whole and compared with its digest: the checksums of cells are xxh3,
which an attacker can forge."""


class Target(NamedTuple):
    """An array that a load fills with a leaf or with a box of it."""

    name: str
    """The name of the saved leaf."""
    leaf: ArrayLeaf
    """Memory with exactly the shape of the box."""
    box: Box | None
    """The part of the global array to load; None for all of it."""


class Destination(NamedTuple):
    """The bytes [begin, end) of a raw block, and the memory that they fill."""

    begin: int
    end: int
    memory: Bytes


class RowPiece(NamedTuple):
    """The part of a row that a load copies into one target."""

    row: Row
    leaf: ArrayLeaf
    """The memory of the target."""
    box: Box
    """The part, as a box of the global array; the object `row.box` itself if it is the whole row."""
    leaf_box: Box
    """The part, as a box of `leaf`."""

    def raw_range(self) -> tuple[int, int]:
        """Return the range of the raw block from the first to the last element of the part, as first byte and end."""
        row = self.row
        itemsize = row.nbytes // max(1, row.box.size)
        first, last = _element_range(self.box.relative_to(row.box), row.box.shape)
        return row.start + first * itemsize, row.start + last * itemsize

    def elements(self, inner: Bytes) -> Bytes:
        """Return the elements of the part in C order. inner: the bytes of `raw_range()`."""
        relative, itemsize = self.box.relative_to(self.row.box), numpy_dtype(self.row.dtype).itemsize
        if contiguous_start(relative, self.row.box.shape) is not None:
            return inner
        strides = [itemsize] * len(self.row.box.shape)
        for axis in range(len(strides) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * self.row.box.shape[axis + 1]
        view = np.ndarray(relative.shape, f"V{itemsize}", inner, 0, tuple(strides))
        return np.ascontiguousarray(view).reshape(-1).view(np.uint8)

    def destination(self) -> Destination | None:
        """Return the byte range and the memory of the part; None unless it is contiguous both in the block and in `leaf`."""
        row, leaf, box, at = self
        flat = leaf.flat
        if flat is None:
            return None
        if box is row.box:
            begin, end = row.start, row.start + row.nbytes
            if len(flat) == row.nbytes:  # the row is the whole leaf
                return Destination(begin, end, flat)
        else:
            if contiguous_start(box.relative_to(row.box), row.box.shape) is None:
                return None
            begin, end = self.raw_range()
        start = contiguous_start(at, leaf.shape)
        if start is None:
            return None
        start *= leaf.itemsize
        return Destination(begin, end, flat[start : start + end - begin])

    def cell_range(self) -> tuple[int, int]:
        """Return the range of whole cells of an uncompressed block that must be read for this piece, as first byte and end."""
        row = self.row
        first, last = (row.start, row.start + row.nbytes) if self.box is row.box else self.raw_range()
        return first // CELL_BYTES * CELL_BYTES, min(row.raw, -(-last // CELL_BYTES) * CELL_BYTES)


def destinations_of(pieces: Iterable[RowPiece]) -> list[Destination] | None:
    """Return the destinations of pieces; None if one of them has none."""
    found: list[Destination] = []
    for piece in pieces:
        destination = piece.destination()
        if destination is None:
            return None
        found.append(destination)
    return found


class PieceCells(NamedTuple):
    """A piece, and the bytes [begin, end) of the whole cells that it touches."""

    begin: int
    end: int
    piece: RowPiece


class CellSpan(NamedTuple):
    """Adjacent cells of a block, all of which are read: the bytes [begin, end) of it."""

    begin: int
    end: int
    pieces: list[PieceCells]
    """The pieces in these cells, in the order in which their cells begin."""


@dataclass(slots=True)
class BlockRead:
    """A block to read, and the pieces of it that go to targets. `row` is any of the block's rows."""

    row: Row
    pieces: list[RowPiece] = field(default_factory=list)
    bypass_cache: bool = False
    """Read the block past the page cache: neither another process of this host nor this one is expected to read it again."""
    _cell_spans: list[CellSpan] | None = None
    _destinations: list[Destination] | None = None

    def cell_spans(self) -> list[CellSpan]:
        """Return the spans of cells to read instead of the whole block; an empty list to read the whole block."""
        if self._cell_spans is None:
            self._cell_spans = self._find_cell_spans()
        return self._cell_spans

    def _find_cell_spans(self) -> list[CellSpan]:
        row, pieces = self.row, self.pieces
        if row.codec is not None or len(row.digest) > _XXH3_DIGEST_BYTES:
            return []
        if len(pieces) == 1:
            if pieces[0].box is pieces[0].row.box and pieces[0].row.nbytes * 2 >= row.raw:
                return []
            cells = pieces[0].cell_range()
            return [CellSpan(*cells, [PieceCells(*cells, pieces[0])])]
        max_partial_bytes = _MAX_PARTIAL_SHARE * row.raw
        if row.raw <= CELL_BYTES or sum(p.row.nbytes for p in pieces if p.box is p.row.box) > max_partial_bytes:
            return []
        spans: list[CellSpan] = []
        total = 0
        for begin, end, piece in sorted(((*piece.cell_range(), piece) for piece in pieces), key=lambda found: found[:2]):
            if spans and begin <= spans[-1].end:
                last = spans[-1]
                total += max(0, end - last.end)
                last.pieces.append(PieceCells(begin, end, piece))
                spans[-1] = CellSpan(last.begin, max(end, last.end), last.pieces)
            else:
                total += end - begin
                spans.append(CellSpan(begin, end, [PieceCells(begin, end, piece)]))
        return spans if total <= max_partial_bytes else []

    def span_at(self, begin: int) -> CellSpan:
        """Return the span that contains byte `begin` of the raw block."""
        return next(span for span in self.cell_spans() if span.begin <= begin < span.end)

    def destinations(self) -> list[Destination] | None:
        """Return the destinations of the pieces; None if one of them has none."""
        if self._destinations is None:
            self._destinations = destinations_of(self.pieces)
        return self._destinations

    def can_stream(self) -> bool:
        """Return whether the block can be copied to its destinations in chunks, because nothing needs all of it at once."""
        return self.row.codec is None and self.destinations() is not None

    def raw_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of the raw block to read, each as first byte and end."""
        return [span[:2] for span in self.cell_spans()] or [(0, self.row.raw)]

    def stored_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of the stored block to read, each as first byte and end."""
        return [span[:2] for span in self.cell_spans()] or [(0, self.row.stored)]

    def planned_bytes(self) -> int:
        """Return the number of stored bytes to read, with those of the base of a difference."""
        base_bytes = 0 if self.row.base is None else self.row.base.stored
        return base_bytes + sum(end - begin for begin, end in self.stored_ranges())


def plan_reads(manifest: Manifest, targets: Sequence[Target], where: str) -> list[BlockRead]:
    """Return the blocks to read, in the order of packs and positions.

    where: the step, for messages.

    Raises IntegrityError if the rows of a leaf do not cover its target.
    """
    with collector_paused():
        return _plan_reads(manifest, targets, where)


def _plan_reads(manifest: Manifest, targets: Sequence[Target], where: str) -> list[BlockRead]:
    blocks: dict[tuple[str, int], BlockRead] = {}
    found = manifest.find([(name, box) for name, _, box in targets])
    for (name, leaf, target), rows in zip(targets, found, strict=True):
        covered = 0
        for row in rows:
            if row.pack is None:
                continue
            box = at = row.box
            if target is not None:
                box, at = _clip(box, target)
            covered += row.nbytes if box is row.box else box.size * leaf.itemsize
            key = (row.pack, row.position)
            if (block := blocks.get(key)) is None:
                block = blocks[key] = BlockRead(row)
            block.pieces.append(RowPiece(row, leaf, box, at))
        if covered != leaf.nbytes:
            raise IntegrityError(
                f"leaf {name} of {where}: the manifest covers {covered} of {leaf.nbytes} bytes; {DAMAGE_ADVICE}"
            )
    return [blocks[key] for key in sorted(blocks)]


def _clip(box: Box, target: Box) -> tuple[Box, Box]:
    """Return the common part of `box` and `target` (the object `box` itself if it is all of it), and its box in `target`."""
    common = intersect(box, target)
    assert common is not None  # the manifest returns only rows that have elements in the target
    return box if common == box else common, common.relative_to(target)


def _element_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the indices of the first element of `box` and after its last, in a flattened array of `shape`."""
    first = last = 0
    for offset, extent, length in zip(box.offset, box.shape, shape, strict=True):
        first = first * length + offset
        last = last * length + offset + extent - 1
    return first, last + 1
