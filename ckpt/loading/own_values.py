"""Which ranks load the values that they themselves have saved of arrays that may differ by rank: buffers of modules."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ckpt.groups.base import Group
from ckpt.loading.target_matching import TargetMatcher
from ckpt.repository.checkpoint import Checkpoint
from ckpt.state.rank_tree import own_name
from ckpt.storage.base.errors import IntegrityError

log = logging.getLogger("ckpt")


def select_own_values(
    matcher: TargetMatcher, checkpoint: Checkpoint, group: Group, wrapped: Collection[str] = frozenset()
) -> None:
    """Change the names of the targets to those of this rank's own values, where it loads these.

    wrapped: the names of targets whose elements are those of arrays in PerRank, and so those of this rank.

    In another layout, ranks that had different values may need equal ones, such as those that share a layer under tensor
    parallelism. So all ranks load the first rank's value if the number of ranks has changed, or if an array is divided in a way
    that no saved array was.

    Raises IntegrityError if the manifest lacks a leaf of the tree.
    """
    mine = {name for name, ranks in matcher.own_ranks.items() if group.rank in ranks}
    if group.size != checkpoint.commit.world_size or not mine:
        return
    if new := {leaf.layout() for _, leaf in matcher.targets} - checkpoint.layouts() - {""}:
        log.info("%s: the ranks divide arrays in another way (%s), so they load buffers of rank 0", checkpoint.where, min(new))
        return
    mine -= _incomplete_views(mine, wrapped, matcher, checkpoint.where)
    saved = checkpoint.saved()
    for name in mine:
        if saved.get(own_name(name, group.rank)) != saved.get(name):
            raise IntegrityError(
                f"leaf {own_name(name, group.rank)} is in the tree of {checkpoint.where}, and its manifest lacks it or has "
                "another type; load another step"
            )
    matcher.targets = [(own_name(name, group.rank) if name in mine else name, leaf) for name, leaf in matcher.targets]
    matcher.aliases.update({own_name(name, group.rank): note for name, note in matcher.aliases.items() if name in mine})


def _incomplete_views(mine: set[str], wrapped: Collection[str], matcher: TargetMatcher, where: str) -> set[str]:
    """Return the own values that would share memory with a value of the first rank. A warning names them.

    A save of this version stores own values of all views of one memory, or of none; ranks may have had other views than rank 0.
    """
    lacking = {note.group: name for name, note in matcher.aliases.items() if name not in mine and name not in wrapped}
    found = {name for name in mine if name in matcher.aliases and matcher.aliases[name].group in lacking}
    if found:
        name = min(found)
        log.warning(
            "leaf %s of %s shares memory with %s, of which this rank has no value of its own: both are loaded from rank 0; "
            "wrap them in ckpt.PerRank",
            name, where, lacking[matcher.aliases[name].group],
        )  # fmt: skip
    return found
