"""Size limits of blocks, and of the small leaves that share a block."""

from __future__ import annotations

from ckpt.state.dtype_names import LARGEST_ELEMENT

BLOCK_BYTES = LARGEST_ELEMENT
"""The most bytes of a block that ckpt writes. A block contains whole elements, so the largest element must fit."""
MAX_BLOCK_BYTES = 8 * BLOCK_BYTES
"""The most bytes, raw or stored, of a block that a load accepts."""
SMALL_LEAF_BYTES = 4 << 20
"""Leaves below this size share blocks."""
