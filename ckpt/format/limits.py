"""Sizes of what is stored: of a block, and of the leaves that share one."""

from __future__ import annotations

from ckpt.state.dtypes import LARGEST_ELEMENT

BLOCK_BYTES = LARGEST_ELEMENT
"""Bytes of a block that ckpt writes, at most. A block holds whole elements, so it must hold the largest one."""
MAX_BLOCK_BYTES = 8 * BLOCK_BYTES
"""Bytes of a block, raw or stored, that a load accepts, at most."""
SMALL_LEAF_BYTES = 4 << 20
"""Leaves below this size share blocks."""
