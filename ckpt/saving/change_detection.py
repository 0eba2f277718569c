"""What a save that copies later remembers of the memory: enough to see that a tensor was changed before its copy was made.

torch counts changes, but not those through `.data` or a numpy view. A digest of everything would take as long as the copy that
the training loop was spared; both ends of each piece of a leaf, a piece being at most a block, take a few microseconds a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.saving.write_plan import Block
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.state.leaves.numpy import HostLeaf

END_BYTES = 64
"""A line of the cache: what is fetched for its first byte anyway."""

BlockSample = list[bytes | None]
"""For each piece of a block; None where its bytes cannot be seen from here."""


def can_be_sampled(leaf: ArrayLeaf) -> bool:
    """Whether it may be copied later. Strided memory of the host may not: its ends are not those of its bytes in C order."""
    return leaf.flat is not None or not isinstance(leaf, HostLeaf)


def sample_block(block: Block, leaves: Sequence[ArrayLeaf]) -> BlockSample:
    """What the pieces of a block hold now. Only memory of the host is looked at, and none that never changes."""
    found: BlockSample = []
    for index, _, begin, _, nbytes in block.pieces:
        leaf = leaves[index]
        flat = None if leaf.is_frozen() else leaf.flat
        found.append(None if flat is None else _ends(flat, begin, begin + nbytes))
    return found


def first_changed_leaf(block: Block, earlier: BlockSample, staged: Bytes) -> int | None:
    """The first leaf whose staged bytes are not those that were sampled before."""
    for (index, _, _, start, nbytes), ends in zip(block.pieces, earlier, strict=True):
        if ends is not None and _ends(staged, start, start + nbytes) != ends:
            return index
    return None


def _ends(data: Bytes, start: int, stop: int) -> bytes:
    first: bytes = data[start : min(stop, start + END_BYTES)].tobytes()
    return first + data[max(start, stop - END_BYTES) : stop].tobytes()
