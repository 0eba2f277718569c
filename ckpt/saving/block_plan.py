"""Pure functions that decide which bytes of a state go into which block, from names, types and shapes alone.

A block is the unit of encoding, digest and deduplication. It contains a part of one leaf, or several small leaves. If several
ranks have replicas of a shard, each rank writes its share of the bytes (replica_split.py), so that no bytes are written twice.
Measured on the reference machine: below 4 MiB the cost of a call shows, above 16 MiB staging and writing overlap less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ckpt.format.limits import BLOCK_BYTES, SMALL_LEAF_BYTES
from ckpt.format.manifest_encoding import PlannedColumns
from ckpt.saving.replica_split import ShardRange, ShardReplica, own_ranges
from ckpt.state.boxes import Box, Replica, contiguous_start, split_into_boxes, whole_box
from ckpt.state.leaves.base import ArrayLeaf, Bytes, LeafPiece, start_reads

PIECE_ALIGNMENT = 64
"""The alignment of a leaf within a shared block: a cache line, so that any vector code can use it in place."""


LeafKind = Literal["", "frozen", "buffer", "changes"]
"""Whether training is expected to change a leaf. Frozen parameters stay the same, and most buffers are constants or change
independently. "changes" means that an earlier save has found it changed, but not all leaves of its block
(`changing_leaves.py`)."""


class LeafSpec(NamedTuple):
    """What the plan needs to know of one leaf or shard."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    codec: str | None
    """The requested codec; leaves with different requested codecs never share a block."""
    global_shape: tuple[int, ...] | None = None
    """For a shard, the shape of the whole array; `shape` and `nbytes` are then those of the shard."""
    offset: tuple[int, ...] = ()
    """The offset of the shard in the array, in elements."""
    replica: Replica | None = None
    """Which replica this is, if several ranks have one."""
    kind: LeafKind = ""
    """Leaves of different kinds never share a block: if one of them changes, the others need not be written again."""


class BlockPiece(NamedTuple):
    """A box of one leaf, and the position of its bytes in the raw block."""

    leaf: int
    """The index of the leaf in the specs."""
    box: Box
    """The box within the shard."""
    begin: int
    """The first byte of the box in the bytes of the leaf, in C order."""
    start: int
    """The first byte of the box in the raw block."""
    nbytes: int


class Block(NamedTuple):
    """Pieces that are stored together. They have the same requested codec, the same kind, and the same element size, which
    shuffling codecs need."""

    pieces: list[BlockPiece]
    nbytes: int
    itemsize: int
    codec: str | None


class BlockPlan(NamedTuple):
    """The blocks of a state, and the columns of its manifest that are known before the write."""

    blocks: list[Block]
    columns: PlannedColumns


def plan_blocks(specs: Sequence[LeafSpec]) -> BlockPlan:
    """Return the plan for leaves of these specs.

    A training loop saves the same structure again and again, so the last two plans are remembered.
    """
    specs = list(specs)
    for known, made in _recent_plans:
        if known == specs:
            return made
    made = _plan_blocks(specs)
    _recent_plans.insert(0, (specs, made))
    del _recent_plans[2:]
    return made


_recent_plans: list[tuple[list[LeafSpec], BlockPlan]] = []
"""The last two plans with their specs, the newest first. No lock: a thread that misses a plan makes it again."""


def _plan_blocks(specs: list[LeafSpec]) -> BlockPlan:
    blocks: list[Block] = []
    empty: list[int] = []
    open_blocks: dict[tuple[int, str | None, LeafKind], _OpenBlock] = {}
    for i, (spec, ranges) in enumerate(zip(specs, _own_ranges(specs), strict=True)):
        if spec.nbytes == 0:
            if not math.prod(spec.global_shape or (0,)):  # otherwise only this shard of the array is empty
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
                assert at is not None  # split_into_boxes returns only contiguous boxes
                length = box.size * spec.itemsize
                piece = BlockPiece(i, box.moved(within.offset), begin + at * spec.itemsize, 0, length)
                blocks.append(Block([piece], length, spec.itemsize, spec.codec))
    blocks = [b if b.nbytes else b._replace(nbytes=b.pieces[-1].start + b.pieces[-1].nbytes) for b in blocks]
    return BlockPlan(blocks, _planned_columns(specs, blocks, empty))


def _own_ranges(specs: list[LeafSpec]) -> list[list[ShardRange] | None]:
    """Return, for each leaf, the ranges that this rank writes; None for the whole leaf."""
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


def stage_block(block: Block, leaves: Sequence[ArrayLeaf], out: Bytes) -> None:
    """Copy the raw bytes of a block to `out` (uint8, at least `block.nbytes` long); gaps and the rest become zero."""
    end = 0
    to_read = []
    for index, box, begin, start, nbytes in block.pieces:
        if end != start:
            out[end:start] = 0
        end = start + nbytes
        part = out[start:end]
        flat = leaves[index].flat
        if flat is not None:
            part[:] = flat[begin : begin + nbytes]
        else:
            to_read.append(LeafPiece(leaves[index], box, part))
    if end != len(out):
        out[end:] = 0
    for transfer in start_reads(to_read):
        transfer.synchronize()
