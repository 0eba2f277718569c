"""Which bytes of the state go into which block. Pure: computed from names, types and shapes alone.

A block is the unit of compression, checksum and reference: part of one leaf, or several small leaves together.
Measured on the reference machine: below 4 MiB the cost of a call shows, above 16 MiB staging and writing overlap less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ckpt.leaves.base import ArrayLeaf
from ckpt.shard import Box, contiguous_start, split, whole

BLOCK_BYTES = 8 << 20
SMALL_BYTES = 4 << 20
"""Leaves below this size share blocks."""

PIECE_ALIGNMENT = 64
"""Where a leaf starts within a shared block: a cache line, so that it can be used in place by any vector code."""


class Piece(NamedTuple):
    """A box of one leaf and where its bytes lie in the raw block."""

    name: str
    leaf: ArrayLeaf
    box: Box
    begin: int
    """First byte of the box in the leaf's own bytes, C order."""
    start: int
    """First byte in the raw block."""
    nbytes: int


class Block(NamedTuple):
    """Pieces that are stored together. All are of one codec and one element size, as shuffling codecs need."""

    pieces: list[Piece]
    nbytes: int
    itemsize: int
    codec: Any


def plan(leaves: Iterable[tuple[str, ArrayLeaf]], codec_of: Callable[[str], Any]) -> tuple[list[Block], list[Piece]]:
    """Return the blocks of the leaves, and the pieces of leaves without bytes, which need no block.

    `codec_of` names the codec wish of a leaf; leaves with different wishes never share a block.
    """
    blocks: list[Block] = []
    empty: list[Piece] = []
    shared: dict[tuple[int, int], _Shared] = {}
    for name, leaf in leaves:
        nbytes = leaf.nbytes
        codec = codec_of(name)
        if nbytes == 0:
            empty.append(Piece(name, leaf, whole(leaf.shape), 0, 0, 0))
        elif nbytes < SMALL_BYTES:
            key = (leaf.itemsize, id(codec))
            open_block = shared.get(key)
            if open_block is None or open_block.end + nbytes > BLOCK_BYTES:
                open_block = shared[key] = _Shared([], 0)
                blocks.append(Block(open_block.pieces, 0, leaf.itemsize, codec))
            start = open_block.end
            open_block.pieces.append(Piece(name, leaf, whole(leaf.shape), 0, start, nbytes))
            open_block.end = -(-(start + nbytes) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        else:
            for box in split(leaf.shape, leaf.itemsize, BLOCK_BYTES):
                begin = contiguous_start(box, leaf.shape)
                assert begin is not None  # split makes only such boxes
                length = box.size * leaf.itemsize
                piece = Piece(name, leaf, box, begin * leaf.itemsize, 0, length)
                blocks.append(Block([piece], length, leaf.itemsize, codec))
    return [b if b.nbytes else b._replace(nbytes=b.pieces[-1].start + b.pieces[-1].nbytes) for b in blocks], empty


class _Shared:
    __slots__ = ("end", "pieces")

    def __init__(self, pieces: list[Piece], end: int) -> None:
        self.pieces = pieces
        self.end = end


def stage(block: Block, out: Any) -> None:
    """Copy the block's raw bytes to `out` (uint8, at least `block.nbytes`); gaps and the rest become zero."""
    end = 0
    for piece in block.pieces:
        if end != piece.start:
            out[end : piece.start] = 0
        end = piece.start + piece.nbytes
        part = out[piece.start : end]
        flat = piece.leaf.flat
        if flat is not None:
            part[:] = flat[piece.begin : piece.begin + piece.nbytes]
        else:
            piece.leaf.read(piece.box, part)
    if end != len(out):
        out[end:] = 0
