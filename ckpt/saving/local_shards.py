"""The local shards: the leaves and shards of a state that this process has, described for the block plan."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ckpt.errors import UnsupportedLeaf
from ckpt.format.codec import CodecOption, parse_option
from ckpt.groups.base import Group
from ckpt.saving.block_plan import LeafKind, LeafSpec
from ckpt.saving.buffer_shares import NO_SHARES, BufferShares
from ckpt.state.boxes import Replica
from ckpt.state.leaves.base import ArrayLeaf, LeafShard
from ckpt.state.rank_tree import own_name
from ckpt.state.tree import FlatState


class LocalShard(NamedTuple):
    """A whole leaf, or one shard of it, in the memory of this process."""

    name: str
    leaf: ArrayLeaf
    part: LeafShard | None
    """The box of the shard in the global array; None for a whole leaf."""
    shape: tuple[int, ...]
    """The shape of the global array."""


def local_shards(flat: FlatState, group: Group) -> list[LocalShard]:
    """Return all leaves and shards of a state in this process, in the order of the tree.

    Raises UnsupportedLeaf if this process saves alone and has no part of a leaf.
    """
    found = []
    make = tuple.__new__  # half the time of the constructor: the caller waits, for up to tens of thousands of leaves
    for name, leaf in flat.leaves.items():
        shards = leaf.shards()
        if shards is None or (not shards and 0 in leaf.shape):  # every rank has all of an array without elements
            found.append(make(LocalShard, (name, leaf, None, leaf.shape)))
        elif group.size == 1 and len(shards) == 1 and shards[0].leaf.shape == leaf.shape:  # within the array, so all of it
            found.append(make(LocalShard, (name, shards[0].leaf, None, leaf.shape)))
        elif not shards and group.size == 1:
            raise UnsupportedLeaf(
                f"leaf {name}: this process has no part of this {type(leaf.value).__name__} of shape {list(leaf.shape)}; save "
                "it with the ranks that have it (group=), or leave it out"
            )
        else:
            found += [LocalShard(name, part.leaf, part, leaf.shape) for part in shards]
    return found


def leaf_specs(
    flat: FlatState, shards: list[LocalShard], codec_option: CodecOption, group: Group, shares: BufferShares = NO_SHARES,
    changing: Collection[str] = frozenset(),
) -> list[LeafSpec]:  # fmt: skip
    """Return what a block plan needs to know of each local shard.

    shares: which buffers this rank stores for itself.
    changing: the names of leaves that are known to change from save to save.

    Raises UnsupportedLeaf if a shard has more replicas than the group has ranks.
    """
    codec_of = parse_option(codec_option)
    # An array whose type does not describe its shards counts as replicated on every rank, as in data parallelism.
    everywhere = Replica(group.rank, group.size, tuple(range(group.size))) if group.size > 1 else None
    # The buffers of a module may differ by rank (BatchNorm statistics) and belong together: rank 0 stores all of its own.
    of_rank_0 = everywhere._replace(is_stored_whole=True) if everywhere is not None else None
    own, buffers, frozen = flat.per_rank, flat.buffers, flat.frozen
    make = tuple.__new__  # as in local_shards
    found = []
    for name, x, part, shape in shards:
        kind: LeafKind = "buffer" if name in buffers else "frozen" if name in frozen else ""
        is_own = name in shares.own
        stored_name = own_name(name, group.rank) if is_own else name
        if stored_name in changing:
            kind = "changes"
        codec = codec_of(name)
        if is_own:
            spec = make(LeafSpec, (stored_name, x.dtype, shape, x.itemsize, x.nbytes, codec, None, (), None, kind))
        elif part is not None:
            if part.replica.total > group.size > 1:  # the shares of the missing replicas would not be written
                raise UnsupportedLeaf(
                    f"leaf {name}: its shard is replica {part.replica.number} of {part.replica.total}, but only {group.size} "
                    "ranks save; with replica=(i, n), each of the n replicas must be on a rank"
                )
            replica = part.replica if part.replica.total > 1 and group.size > 1 else None
            spec = LeafSpec(
                name=name,
                dtype=x.dtype,
                shape=x.shape,
                itemsize=x.itemsize,
                nbytes=x.nbytes,
                codec=codec,
                global_shape=shape,
                offset=part.box.offset,
                replica=replica,
                kind=kind,
            )
        elif everywhere is not None and name not in own:
            copies = of_rank_0 if name in buffers else everywhere
            at = (0,) * len(shape)
            spec = make(LeafSpec, (name, x.dtype, shape, x.itemsize, x.nbytes, codec, None, at, copies, kind))
        else:
            spec = make(LeafSpec, (name, x.dtype, shape, x.itemsize, x.nbytes, codec, None, (), None, kind))
        found.append(spec)
    return found
