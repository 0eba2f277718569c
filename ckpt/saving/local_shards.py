"""What this process holds of a state: whole leaves and shards, told to the plan by name, place and copies."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ckpt.errors import UnsupportedLeaf
from ckpt.format.codec import CodecOption, parse_option
from ckpt.groups.base import Group
from ckpt.saving.write_plan import LeafKind, LeafSpec
from ckpt.state.boxes import Replica
from ckpt.state.leaves.base import ArrayLeaf, LeafShard
from ckpt.state.tree import FlatState


class LocalShard(NamedTuple):
    """Memory that this process holds: a whole leaf, or a shard of one."""

    name: str
    leaf: ArrayLeaf
    part: LeafShard | None
    """Where it lies in the global array."""
    shape: tuple[int, ...]
    """Of the global array."""


def local_shards(flat: FlatState, group: Group) -> list[LocalShard]:
    """All that a state holds here, in the order of the tree. Raises UnsupportedLeaf where this process saves alone and holds
    nothing of a leaf."""
    found = []
    make = tuple.__new__  # half the time of the constructor, for tens of thousands of leaves while the caller waits
    for name, leaf in flat.leaves.items():
        shards = leaf.shards()
        if shards is None or (not shards and 0 in leaf.shape):  # of an array without elements every rank holds all
            found.append(make(LocalShard, (name, leaf, None, leaf.shape)))
        elif not shards and group.size == 1:
            raise UnsupportedLeaf(
                f"leaf {name}: a {type(leaf.value).__name__} of shape {list(leaf.shape)} of which this process holds no part, "
                "as where its device mesh does not contain the process; save it with the ranks that hold it (group=), or leave "
                "it out of the state"
            )
        else:
            found += [LocalShard(name, part.leaf, part, leaf.shape) for part in shards]
    return found


def leaf_specs(
    flat: FlatState, shards: list[LocalShard], codec_option: CodecOption, group: Group, changing: Collection[str] = frozenset()
) -> list[LeafSpec]:
    """What a plan needs to know of each, this rank being one of a group. changing: names of leaves that are known to change."""
    codec_of = parse_option(codec_option)
    # Of arrays that do not say otherwise every rank has an equal copy, as data parallelism keeps them.
    everywhere = Replica(group.rank, group.size, tuple(range(group.size))) if group.size > 1 else None
    # Buffers of a module may differ by rank (the statistics of a BatchNorm under DDP) and belong together: all are rank 0's.
    of_rank_0 = everywhere._replace(is_stored_whole=True) if everywhere is not None else None
    own, buffers, frozen = flat.per_rank, flat.buffers, flat.frozen
    make = tuple.__new__  # as above
    found = []
    for name, x, part, shape in shards:
        kind: LeafKind = "buffer" if name in buffers else "frozen" if name in frozen else ""
        if name in changing:
            kind = "changes"
        codec = codec_of(name)
        if part is not None:
            if part.replica.total > group.size > 1:  # the shares of the others would be missing
                raise UnsupportedLeaf(
                    f"leaf {name}: its shard is copy {part.replica.number} of {part.replica.total}, but {group.size} ranks "
                    "save; "
                    "of replica=(i, n) each copy must be on a rank"
                )
            replica = part.replica if part.replica.total > 1 and group.size > 1 else None
            spec = LeafSpec(name, x.dtype, x.shape, x.itemsize, x.nbytes, codec, shape, part.box.offset, replica, kind)
        elif everywhere is not None and name not in own:
            copies = of_rank_0 if name in buffers else everywhere
            at = (0,) * len(shape)
            spec = make(LeafSpec, (name, x.dtype, shape, x.itemsize, x.nbytes, codec, None, at, copies, kind))
        else:
            spec = make(LeafSpec, (name, x.dtype, shape, x.itemsize, x.nbytes, codec, None, (), None, kind))
        found.append(spec)
    return found
