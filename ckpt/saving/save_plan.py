"""What a save writes: the leaves of a state that this rank has, and the blocks that they go into. Nothing is copied yet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckpt.block_io.staging_arena import round_up
from ckpt.format.codec import CodecOption
from ckpt.format.manifest import PlannedColumns
from ckpt.groups.base import Group
from ckpt.saving.local_shards import leaf_specs, local_shards
from ckpt.saving.options import Options
from ckpt.saving.write_plan import Block, LeafSpec, plan_blocks
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.tree import FlatState, flatten
from ckpt.support.runtime import collector_paused


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Of one attempt. Lists of leaves are in the order of the specs."""

    step: int
    algorithm: str
    """Of digests."""
    flat: FlatState
    leaves: list[ArrayLeaf]
    specs: list[LeafSpec]
    blocks: list[Block]
    columns: PlannedColumns
    """Of the manifest, as far as they are known before anything is written."""
    has_shards: bool
    """Whether the rows may be of parts of arrays."""

    @property
    def total_bytes(self) -> int:
        """What is written where nothing of it is known yet, before any codec."""
        return sum(round_up(block.nbytes) for block in self.blocks)

    def name(self, leaf: int) -> str:
        """The name of a leaf."""
        return self.specs[leaf].name


def flatten_state(state: Any, group: Group) -> FlatState:
    """The leaves of a state, before anything is written; raise UnsupportedLeaf."""
    with collector_paused():
        return flatten(state, group.rank if group.size > 1 else None)


def plan_save(
    step: int, algorithm: str, flat: FlatState, codec: CodecOption, changing: Collection[str], group: Group
) -> SavePlan:
    """Plan a save. changing: names of the leaves that share no block with those that stay as they are."""
    shards = local_shards(flat, group)
    specs = leaf_specs(flat, shards, codec, group, changing)
    blocks, columns = plan_blocks(specs)
    has_shards = any(h.part is not None for h in shards)
    return SavePlan(step, algorithm, flat, [h.leaf for h in shards], specs, blocks, columns, has_shards)


def planned_bytes(state: Any, options: Options, group: Group) -> int:
    """What this rank writes of a state where nothing of it is known yet, before any codec."""
    flat = flatten_state(state, group)
    with collector_paused():
        blocks = plan_blocks(leaf_specs(flat, local_shards(flat, group), options.codec, group)).blocks
    return sum(round_up(block.nbytes) for block in blocks)
