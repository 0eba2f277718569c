"""Which ranks load the values that they themselves have saved of arrays that may differ by rank: buffers of modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ckpt.groups.base import Group
from ckpt.repository.checkpoint import Checkpoint
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.rank_tree import own_name
from ckpt.storage.base.errors import IntegrityError

log = logging.getLogger("ckpt")

Targets = list[tuple[str, ArrayLeaf]]
"""The name of each saved leaf to read, and the array to fill."""


def with_own_values(targets: Targets, own_ranks: Mapping[str, Sequence[int]], checkpoint: Checkpoint, group: Group) -> Targets:
    """Return the targets, with the names of this rank's own values where it loads these.

    own_ranks: by leaf name, the ranks that have saved a value of their own.

    In another layout, ranks may need equal values that had different ones: those that share a layer under tensor parallelism.
    So all ranks load the first rank's value if their number has changed, or if an array is divided in a way that no array was.
    """
    mine = {name for name, ranks in own_ranks.items() if group.rank in ranks}
    if group.size != checkpoint.commit.world_size or not mine:
        return targets
    if new := {leaf.layout() for _, leaf in targets} - checkpoint.layouts() - {""}:
        log.info("%s: the ranks divide arrays in another way (%s), so they load buffers of rank 0", checkpoint.where, min(new))
        return targets
    saved = checkpoint.saved()
    for name in mine:
        if saved.get(own_name(name, group.rank)) != saved.get(name):
            raise IntegrityError(
                f"leaf {own_name(name, group.rank)} is in the tree of {checkpoint.where}, and its manifest lacks it or has "
                "another type; load another step"
            )
    return [(own_name(name, group.rank) if name in mine else name, leaf) for name, leaf in targets]
