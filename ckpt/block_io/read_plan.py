"""What a load wants: of each block the pieces that go somewhere, and the bytes that are read for them. Pure.

Where only parts of an uncompressed block are wanted, only their cells are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt.format.digest import CELL_BYTES
from ckpt.format.manifest import Manifest, Row
from ckpt.state.boxes import Box, contiguous_start, intersect
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.storage.base.errors import IntegrityError
from ckpt.support.runtime import collector_paused

_MAX_PARTIAL_SHARE = 0.8
"""Cells of several pieces are read instead of all the block where they are less of it than that."""


_XXH3_DIGEST_BYTES = 16
"""A longer digest is blake3. The sums of cells are xxh3, which anybody can forge: such a block is read whole and compared with
its digest, whatever is wanted of it."""


class Target(NamedTuple):
    """Where a leaf, or a box of it, is to go."""

    name: str
    leaf: ArrayLeaf
    """Memory of exactly the shape of the box."""
    box: Box | None
    """The part of the global array that it holds; None: all of it."""


Destination = tuple[int, int, Bytes]
"""Bytes of a raw block, from and to, and the memory that they fill."""


class RowPiece(NamedTuple):
    """A part of a row that goes somewhere."""

    row: Row
    leaf: ArrayLeaf
    box: Box
    """In the global array; the very `row.box` where that is wanted whole."""
    leaf_box: Box
    """In `leaf`."""

    def raw_range(self) -> tuple[int, int]:
        """The bytes of the raw block from the first to the last that is wanted."""
        row = self.row
        itemsize = row.nbytes // max(1, row.box.size)
        first, last = _element_range(self.box.relative_to(row.box), row.box.shape)
        return row.start + first * itemsize, row.start + last * itemsize

    def destination(self) -> Destination | None:
        """Where its bytes lie and go to; None where they are not contiguous on both sides."""
        row, leaf, box, at = self
        flat = leaf.flat
        if flat is None:
            return None
        if box is row.box:
            begin, end = row.start, row.start + row.nbytes
            if len(flat) == row.nbytes:  # a whole small leaf
                return begin, end, flat
        else:
            if contiguous_start(box.relative_to(row.box), row.box.shape) is None:
                return None
            begin, end = self.raw_range()
        start = contiguous_start(at, leaf.shape)
        if start is None:
            return None
        start *= leaf.itemsize
        return begin, end, flat[start : start + end - begin]

    def cell_range(self) -> tuple[int, int]:
        """What of an uncompressed block must be read for this piece, from and to: whole cells."""
        row = self.row
        first, last = (row.start, row.start + row.nbytes) if self.box is row.box else self.raw_range()
        return first // CELL_BYTES * CELL_BYTES, min(row.raw, -(-last // CELL_BYTES) * CELL_BYTES)


def destinations_of(pieces: Iterable[RowPiece]) -> list[Destination] | None:
    """Where pieces go; None where one of them has no place."""
    found: list[Destination] = []
    for piece in pieces:
        place = piece.destination()
        if place is None:
            return None
        found.append(place)
    return found


PieceCells = tuple[int, int, RowPiece]
"""A piece and the cells that it touches, from and to."""


class CellRun(NamedTuple):
    """Cells of a block that lie beside each other, of which all are wanted."""

    begin: int
    end: int
    pieces: list[PieceCells]
    """Those that lie in them, in the order in which their cells begin."""


@dataclass(slots=True)
class BlockRead:
    """A block and the pieces of it that go somewhere. `row` is one of those that lie in it."""

    row: Row
    pieces: list[RowPiece] = field(default_factory=list)
    bypass_cache: bool = False
    """To be read past the page cache: no other process of this host is known to read it, nor this one again."""
    _cell_runs: list[CellRun] | None = None
    _destinations: list[Destination] | None = None

    def cell_runs(self) -> list[CellRun]:
        """The cells that are read instead of all of the block; none where that is not worth it."""
        if self._cell_runs is None:
            self._cell_runs = self._find_cell_runs()
        return self._cell_runs

    def _find_cell_runs(self) -> list[CellRun]:
        row, pieces = self.row, self.pieces
        if row.codec is not None or len(row.digest) > _XXH3_DIGEST_BYTES:
            return []
        if len(pieces) == 1:
            if pieces[0].box is pieces[0].row.box and pieces[0].row.nbytes * 2 >= row.raw:
                return []
            cells = pieces[0].cell_range()
            return [CellRun(*cells, [(*cells, pieces[0])])]
        max_partial_bytes = _MAX_PARTIAL_SHARE * row.raw
        if row.raw <= CELL_BYTES or sum(p.row.nbytes for p in pieces if p.box is p.row.box) > max_partial_bytes:
            return []
        runs: list[CellRun] = []
        total = 0
        for begin, end, piece in sorted(((*piece.cell_range(), piece) for piece in pieces), key=lambda found: found[:2]):
            if runs and begin <= runs[-1].end:
                last = runs[-1]
                total += max(0, end - last.end)
                last.pieces.append((begin, end, piece))
                runs[-1] = CellRun(last.begin, max(end, last.end), last.pieces)
            else:
                total += end - begin
                runs.append(CellRun(begin, end, [(begin, end, piece)]))
        return runs if total <= max_partial_bytes else []

    def run_at(self, begin: int) -> CellRun:
        """The one in which a byte of the block lies."""
        return next(run for run in self.cell_runs() if run.begin <= begin < run.end)

    def destinations(self) -> list[Destination] | None:
        """Where its pieces go; None where one of them has no place."""
        if self._destinations is None:
            self._destinations = destinations_of(self.pieces)
        return self._destinations

    def can_stream(self) -> bool:
        """Whether it can go to its places chunk by chunk: where nothing needs all of it at once."""
        return self.bypass_cache and self.row.codec is None and self.destinations() is not None

    def raw_ranges(self) -> list[tuple[int, int]]:
        """What of the raw block is read, each from and to."""
        return [run[:2] for run in self.cell_runs()] or [(0, self.row.raw)]

    def stored_ranges(self) -> list[tuple[int, int]]:
        """What is read of it as it is stored, each from and to."""
        return [run[:2] for run in self.cell_runs()] or [(0, self.row.stored)]

    def read_bytes(self) -> int:
        """The bytes that are read of it, as stored."""
        return sum(end - begin for begin, end in self.stored_ranges())


def plan_reads(manifest: Manifest, targets: Sequence[Target], where: str) -> list[BlockRead]:
    """The blocks to read, in the order in which they lie."""
    with collector_paused():
        return _plan_reads(manifest, targets, where)


def _plan_reads(manifest: Manifest, targets: Sequence[Target], where: str) -> list[BlockRead]:
    """The blocks to read, in the order in which they lie."""
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
            raise IntegrityError(f"leaf {name} of {where}: the manifest covers {covered} of {leaf.nbytes} bytes")
    return [blocks[key] for key in sorted(blocks)]


def _clip(box: Box, target: Box) -> tuple[Box, Box]:
    """The part of `box` that lies in `target`, `box` itself where that is all of it; and where it lies in there."""
    common = intersect(box, target)
    assert common is not None  # the manifest found it
    return box if common == box else common, common.relative_to(target)


def _element_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """First and one past the last element of `box` in an array of `shape`, C order."""
    first = last = 0
    for offset, extent, length in zip(box.offset, box.shape, shape, strict=True):
        first = first * length + offset
        last = last * length + offset + extent - 1
    return first, last + 1
