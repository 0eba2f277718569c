"""Detects a tensor that was changed before a save copied its deferred block, by samples of its memory.

torch counts changes, but not those through `.data` or a numpy view. A digest of all bytes would take as long as the copy that
is deferred. So only both ends of each piece of a block are compared, which takes a few microseconds a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.saving.block_plan import Block
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.state.leaves.numpy import HostLeaf

END_BYTES = 64
"""The bytes that are compared at each end: a cache line, which reading one byte fetches anyway."""

BlockSample = list[bytes | None]
"""The first and last bytes of each piece of a block; None if they can't be read from the host."""


def can_be_sampled(leaf: ArrayLeaf) -> bool:
    """Return whether a leaf may be copied later. Strided host memory may not: its ends are not its first and last elements."""
    return leaf.flat is not None or not isinstance(leaf, HostLeaf)


def sample_block(block: Block, leaves: Sequence[ArrayLeaf]) -> BlockSample:
    """Return the current sample of each piece of a block. Only host memory is read, and no immutable leaf."""
    found: BlockSample = []
    for index, _, begin, _, nbytes in block.pieces:
        leaf = leaves[index]
        flat = None if leaf.is_immutable() else leaf.flat
        found.append(None if flat is None else _ends(flat, begin, begin + nbytes))
    return found


def first_changed_leaf(block: Block, earlier: BlockSample, staged: Bytes) -> int | None:
    """Return the index of the first leaf whose staged bytes differ from the earlier sample, or None."""
    for (index, _, _, start, nbytes), ends in zip(block.pieces, earlier, strict=True):
        if ends is not None and _ends(staged, start, start + nbytes) != ends:
            return index
    return None


def _ends(data: Bytes, start: int, stop: int) -> bytes:
    first: bytes = data[start : min(stop, start + END_BYTES)].tobytes()
    return first + data[max(start, stop - END_BYTES) : stop].tobytes()
