"""Finds the blocks that an asynchronous save may copy after it has returned, and detects if they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.errors import StateChanged
from ckpt.saving.block_plan import Block
from ckpt.saving.change_detection import BlockSample, can_be_sampled, sample_block
from ckpt.saving.save_plan import SavePlan
from ckpt.state.leaves.base import ArrayLeaf


@dataclass(frozen=True, slots=True)
class _LeafVersion:
    """The number of changes that a leaf had counted when the save began."""

    leaf: ArrayLeaf
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class DeferredBlocks:
    """The blocks that are staged after the save has returned, and their state when it began."""

    numbers: list[int] = field(default_factory=list)
    """The indexes of the blocks in the plan."""
    samples: dict[int, BlockSample] = field(default_factory=dict)
    """Samples of their bytes, by index."""
    versions: list[_LeafVersion] = field(default_factory=list)
    """The versions of those leaves that count their changes."""

    def first_changed_name(self) -> str | None:
        """Return the name of a leaf that has counted a change since the save began, or None."""
        return next((before.name for before in self.versions if before.leaf.version() != before.count), None)


def find_deferred_blocks(plan: SavePlan, is_deferrable: Callable[[ArrayLeaf], bool] | None) -> DeferredBlocks:
    """Return the blocks that can be deferred, with samples of their present bytes: those of which each leaf is immutable or
    deferrable.

    is_deferrable: whether the user promises not to change a leaf before `SaveHandle.staged` is set.
    """
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
        leaf.is_immutable() or (is_deferrable is not None and is_deferrable(leaf) and can_be_sampled(leaf)) for leaf in leaves
    )


def changed_error(name: str, step: int) -> StateChanged:
    """Return the error for a leaf that was changed before it was staged."""
    return StateChanged(
        f"leaf {name} was changed while step {step} was being staged, so the step is not saved; "
        "change attached parameters only through the optimizer's step(), or save without attach()"
    )
