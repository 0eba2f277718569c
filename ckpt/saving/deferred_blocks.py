"""Blocks that an asynchronous save copies after it has returned, and the proof that nobody changed them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.errors import StateChanged
from ckpt.saving.change_detection import BlockSample, can_be_sampled, sample_block
from ckpt.saving.save_plan import SavePlan
from ckpt.saving.write_plan import Block
from ckpt.state.leaves.base import ArrayLeaf


@dataclass(frozen=True, slots=True)
class _LeafVersion:
    """How often a leaf had been changed when the save began."""

    leaf: ArrayLeaf
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class DeferredBlocks:
    """The blocks that are staged late, by their numbers in the plan, and what is known of them beforehand."""

    numbers: list[int] = field(default_factory=list)
    samples: dict[int, BlockSample] = field(default_factory=dict)
    """By the number of the block."""
    versions: list[_LeafVersion] = field(default_factory=list)
    """Of the leaves that count their changes."""

    def first_changed_name(self) -> str | None:
        """The name of a leaf that has counted a change since, None where none has."""
        return next((its.name for its in self.versions if its.leaf.version() != its.count), None)


def find_deferred_blocks(plan: SavePlan, is_deferrable: Callable[[ArrayLeaf], bool] | None) -> DeferredBlocks:
    """The blocks whose leaves nobody changes before `SaveHandle.staged` is set, as they are now."""
    numbers = [i for i, block in enumerate(plan.blocks) if _is_deferred(plan, block, is_deferrable)]
    versions: dict[int, _LeafVersion] = {}
    for i in numbers:
        for piece in plan.blocks[i].pieces:
            leaf = plan.leaves[piece.leaf]
            if (count := leaf.version()) is not None:
                versions[piece.leaf] = _LeafVersion(leaf, plan.name(piece.leaf), count)
    samples = {i: sample_block(plan.blocks[i], plan.leaves) for i in numbers}
    return DeferredBlocks(numbers, samples, list(versions.values()))


def _is_deferred(plan: SavePlan, block: Block, is_deferrable: Callable[[ArrayLeaf], bool] | None) -> bool:
    leaves = [plan.leaves[piece.leaf] for piece in block.pieces]
    return all(
        leaf.is_frozen() or (is_deferrable is not None and is_deferrable(leaf) and can_be_sampled(leaf)) for leaf in leaves
    )


def changed_error(name: str, step: int) -> StateChanged:
    """What to raise where a leaf was changed too early."""
    return StateChanged(
        f"leaf {name} was changed while step {step} was being staged; this save is given up. "
        "Change attached parameters only through the optimizer's step(), or save without attach()"
    )
