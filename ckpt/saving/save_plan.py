"""Plans a save before anything is copied: which leaves of the state this rank writes, and into which blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.block_io.staging_arena import round_up
from ckpt.format.codec import CodecOption
from ckpt.format.manifest_encoding import PlannedColumns
from ckpt.groups.base import Group
from ckpt.saving.block_plan import Block, LeafSpec, plan_blocks
from ckpt.saving.buffer_shares import BufferShares, buffer_shares
from ckpt.saving.local_shards import leaf_specs, local_shards
from ckpt.saving.options import Options
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.shared_objects import leaves_of_one_state
from ckpt.state.tree import FlatState, flatten
from ckpt.support.runtime import collector_paused

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one save attempt writes. `leaves` and `specs` have the same order."""

    step: int
    algorithm: str
    """The digest algorithm."""
    flat: FlatState
    leaves: list[ArrayLeaf]
    specs: list[LeafSpec]
    blocks: list[Block]
    columns: PlannedColumns
    """The columns of the manifest that do not depend on what is written."""
    buffers: BufferShares
    has_shards: bool
    """Whether a row of the manifest may describe a part of an array."""

    @property
    def total_bytes(self) -> int:
        """The bytes that are written if no block is deduplicated and no codec is used."""
        return sum(round_up(block.nbytes) for block in self.blocks)

    def name(self, leaf: int) -> str:
        """Return the name of the leaf with this index."""
        return self.specs[leaf].name


def flatten_state(state: Any, group: Group) -> FlatState:
    """Return the leaves and the tree of a state; raise UnsupportedLeaf."""
    with collector_paused(), leaves_of_one_state():
        return flatten(state, group.rank if group.size > 1 else None)


def cuda_device_of(flat: FlatState) -> torch.device | None:
    """Return the first CUDA device that has a leaf of a state, or None."""
    devices = (leaf.cuda_device() for leaf in flat.leaves.values() if leaf.flat is None)
    return next((device for device in devices if device is not None), None)


def plan_save(
    step: int, algorithm: str, flat: FlatState, codec: CodecOption, changing: Collection[str], group: Group
) -> SavePlan:
    """Return the plan of a save.

    changing: the names of the leaves that must not share a block with unchanging leaves.
    """
    shards = local_shards(flat, group)
    buffers = buffer_shares(flat, shards, group)
    specs = leaf_specs(flat, shards, codec, group, buffers, changing)
    blocks, columns = plan_blocks(specs)
    has_shards = any(shard.part is not None for shard in shards)
    return SavePlan(
        step=step,
        algorithm=algorithm,
        flat=flat,
        leaves=[shard.leaf for shard in shards],
        specs=specs,
        blocks=blocks,
        columns=columns,
        buffers=buffers,
        has_shards=has_shards,
    )


def planned_bytes(flat: FlatState, options: Options, group: Group) -> int:
    """Return the bytes that this rank writes of a state if no block is deduplicated and no codec is used."""
    with collector_paused():
        shards = local_shards(flat, group)
        blocks = plan_blocks(leaf_specs(flat, shards, options.codec, group, buffer_shares(flat, shards, group))).blocks
    return sum(round_up(block.nbytes) for block in blocks)
