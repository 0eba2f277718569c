"""Leaves of Paddle's distributed tensors (`paddle.distributed.shard_tensor`), of which a rank has a box by the placements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import paddle

from ckpt.state.boxes import Replica
from ckpt.state.leaves.base import ArrayLeaf, LeafShard
from ckpt.state.leaves.paddle import as_leaf as leaf_of
from ckpt.state.leaves.paddle import dtype_and_size, paddle_attributes
from ckpt.state.leaves.sharded import ShardedLeaf
from ckpt.state.mesh_boxes import MeshSplit, replica_on_mesh, shard_boxes

_OPTION = re.compile(r"(split_factor|shard_order)=(\d+)")
_Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""The lengths of a mesh, and its ranks."""


def as_leaf(value: Any) -> ArrayLeaf:
    """Return the leaf of a distributed tensor; raise TypeError for one that is a sum still to be reduced."""
    shape = tuple(value.shape)
    dtype, itemsize = dtype_and_size(value)
    splits = _splits(value.placements, len(shape))
    mesh = tuple(value.process_mesh.shape), tuple(value.process_mesh.process_ids)
    parts = []
    if (position := _position(mesh, splits, paddle.distributed.get_rank())) is not None:
        coordinate, replica = position
        local = value._local_value()
        for box, within in shard_boxes(shape, mesh[0], coordinate, splits):
            if tuple(local.shape) != within.shape:
                raise TypeError(
                    f"a distributed tensor of shape {list(shape)} with {value.placements} whose local tensor has the shape "
                    f"{list(local.shape)}: reshard it with paddle.distributed.reshard first"
                )
            parts.append(LeafShard(leaf_of(local), box, replica))
    return ShardedLeaf(value, "paddle", shape, dtype, itemsize, parts, paddle_attributes(value))


def copy_from_whole(target: Any, whole: Any) -> None:
    """Copy the box that this rank has of a distributed tensor from a plain tensor of the whole shape."""
    for part in as_leaf(target).shards() or []:
        part.leaf.value.copy_(whole[part.box.slices()], True)


def _splits(placements: Sequence[Any], rank: int) -> tuple[MeshSplit, ...]:
    """Return how each mesh dimension shards a tensor of `rank` axes."""
    found: list[MeshSplit] = []
    orders: dict[int, int] = {}
    for placement in placements:
        if placement.is_partial():
            raise TypeError(
                "a distributed tensor with a Partial placement is a sum still to be reduced: reshard it to Replicate() or "
                "Shard() with paddle.distributed.reshard first"
            )
        if placement.is_replicated():
            found.append(None)
            continue
        axis = next((axis for axis in range(rank) if placement.is_shard(axis)), None)
        options = dict(_OPTION.findall(str(placement)))  # a Placement of the base class has them only in its text
        order = int(options.get("shard_order", 0))
        if axis is None or options.get("split_factor", "1") != "1" or order < orders.get(axis, 0):
            raise TypeError(
                f"a distributed tensor with the placement {placement} has no single box: reshard it with "
                "paddle.distributed.reshard first"
            )
        orders[axis] = order
        found.append((axis, 1))
    return tuple(found)


@lru_cache(maxsize=1024)
def _position(mesh: _Mesh, splits: tuple[MeshSplit, ...], rank: int) -> tuple[tuple[int, ...], Replica] | None:
    """Return the coordinate of a rank and its copy of a shard; None for a rank outside of the mesh."""
    lengths, ids = mesh
    if rank not in ids:
        return None
    coordinate = tuple(int(at) for at in np.unravel_index(ids.index(rank), lengths))
    return coordinate, replica_on_mesh(np.array(ids).reshape(lengths), coordinate, [split is None for split in splits])
