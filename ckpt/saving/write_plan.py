"""Which bytes of the state go into which block. Pure: computed from names, types and shapes alone.

A block is the unit of compression, checksum and reference: part of one leaf, or several small leaves together. Of a shard
that several ranks hold each takes its share of the bytes (share.py), so that no two write the same.
Measured on the reference machine: below 4 MiB the cost of a call shows, above 16 MiB staging and writing overlap less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ckpt.format.limits import BLOCK_BYTES, SMALL_LEAF_BYTES
from ckpt.format.manifest import PlannedColumns
from ckpt.saving.replica_split import ShardRange, ShardReplica, own_ranges
from ckpt.state.boxes import Box, Replica, contiguous_start, split_into_boxes, whole_box
from ckpt.state.leaves.base import ArrayLeaf

PIECE_ALIGNMENT = 64
"""Where a leaf starts within a shared block: a cache line, so that it can be used in place by any vector code."""


LeafKind = Literal["", "frozen", "buffer", "changes"]
"""What tells whether training changes a leaf: frozen parameters stay, most buffers are constants or change by themselves. Of
some leaves earlier saves have found that they change where others of their block stay (`changes.py`)."""


class LeafSpec(NamedTuple):
    """All that a plan depends on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    codec: str | None
    """The wish for its codec; leaves with different wishes never share a block."""
    global_shape: tuple[int, ...] | None = None
    """Of the whole array where this is a shard of it; `shape` and `nbytes` are of the shard then."""
    offset: tuple[int, ...] = ()
    """Of the shard."""
    replica: Replica | None = None
    """Which copy this is, where several ranks hold it."""
    kind: LeafKind = ""
    """Leaves of different kinds never share a block: if one of them changes, the others need not be written again."""


class BlockPiece(NamedTuple):
    """A box of one leaf and where its bytes lie in the raw block."""

    leaf: int
    """Which leaf, in the order of the specs."""
    box: Box
    """Within the shard."""
    begin: int
    """First byte of the box in the leaf's own bytes, C order."""
    start: int
    """First byte in the raw block."""
    nbytes: int


class Block(NamedTuple):
    """Pieces that are stored together. All are of one codec wish, one element size, as shuffling codecs need, and one kind."""

    pieces: list[BlockPiece]
    nbytes: int
    itemsize: int
    codec: str | None


class WritePlan(NamedTuple):
    """The blocks of a state, and the columns of its manifest that are known before anything is written."""

    blocks: list[Block]
    columns: PlannedColumns


def plan_blocks(specs: Sequence[LeafSpec]) -> WritePlan:
    """Return the plan for leaves of these specs.

    A training loop saves one structure over and over: the plan of the last two is remembered.
    """
    specs = list(specs)
    for known, made in _recent_plans:
        if known == specs:
            return made
    made = _plan_blocks(specs)
    _recent_plans.insert(0, (specs, made))
    del _recent_plans[2:]
    return made


_recent_plans: list[tuple[list[LeafSpec], WritePlan]] = []


def _plan_blocks(specs: list[LeafSpec]) -> WritePlan:
    blocks: list[Block] = []
    empty: list[int] = []
    open_blocks: dict[tuple[int, str | None, LeafKind], _OpenBlock] = {}
    for i, (spec, ranges) in enumerate(zip(specs, _own_ranges(specs), strict=True)):
        if spec.nbytes == 0:
            if not math.prod(spec.global_shape or (0,)):  # else only this shard is empty, and others hold the array
                empty.append(i)
            continue
        for first, within in [(0, whole_box(spec.shape))] if ranges is None else ranges:
            nbytes = within.size * spec.itemsize
            begin = first * spec.itemsize
            if nbytes < SMALL_LEAF_BYTES:
                key = (spec.itemsize, spec.codec, spec.kind)
                open_block = open_blocks.get(key)
                if open_block is None or open_block.end + nbytes > BLOCK_BYTES:
                    open_block = open_blocks[key] = _OpenBlock([], 0)
                    blocks.append(Block(open_block.pieces, 0, spec.itemsize, spec.codec))
                start = open_block.end
                open_block.pieces.append(BlockPiece(i, within, begin, start, nbytes))
                open_block.end = -(-(start + nbytes) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
                continue
            for box in split_into_boxes(within.shape, spec.itemsize, BLOCK_BYTES):
                at = contiguous_start(box, within.shape)
                assert at is not None  # split makes only such boxes
                length = box.size * spec.itemsize
                piece = BlockPiece(i, box.moved(within.offset), begin + at * spec.itemsize, 0, length)
                blocks.append(Block([piece], length, spec.itemsize, spec.codec))
    blocks = [b if b.nbytes else b._replace(nbytes=b.pieces[-1].start + b.pieces[-1].nbytes) for b in blocks]
    return WritePlan(blocks, _planned_columns(specs, blocks, empty))


def _own_ranges(specs: list[LeafSpec]) -> list[list[ShardRange] | None]:
    """For each leaf what of it this rank writes, None for all of it."""
    if not any(spec.replica for spec in specs):
        return [None] * len(specs)
    shards = [
        ShardReplica(s.name, s.offset, s.shape, s.itemsize, s.nbytes, s.replica) if s.replica and s.nbytes else None
        for s in specs
    ]
    return own_ranges(shards)


def _planned_columns(specs: list[LeafSpec], blocks: list[Block], empty: list[int]) -> PlannedColumns:
    pieces = [BlockPiece(i, whole_box(specs[i].shape), 0, 0, 0) for i in empty]
    index: list[int | None] = [None] * len(empty)
    for n, block in enumerate(blocks):
        pieces += block.pieces
        index += [n] * len(block.pieces)
    of = [specs[p.leaf] for p in pieces]
    return PlannedColumns(
        leaf=[s.name for s in of],
        dtype=[s.dtype for s in of],
        global_shape=[s.shape if s.global_shape is None else s.global_shape for s in of],
        box=[p.box if s.global_shape is None else p.box.moved(s.offset) for p, s in zip(pieces, of, strict=True)],
        start=[p.start for p in pieces],
        nbytes=[p.nbytes for p in pieces],
        block=index,
    )


class _OpenBlock:
    __slots__ = ("end", "pieces")

    def __init__(self, pieces: list[BlockPiece], end: int) -> None:
        self.pieces = pieces
        self.end = end


def stage_block(block: Block, leaves: Sequence[ArrayLeaf], out: Any) -> None:
    """Copy the block's raw bytes to `out` (uint8, at least `block.nbytes`); gaps and the rest become zero."""
    end = 0
    for index, box, begin, start, nbytes in block.pieces:
        if end != start:
            out[end:start] = 0
        end = start + nbytes
        part = out[start:end]
        flat = leaves[index].flat
        if flat is not None:
            part[:] = flat[begin : begin + nbytes]
        else:
            leaves[index].read(box, part)
    if end != len(out):
        out[end:] = 0
