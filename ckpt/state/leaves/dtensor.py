"""Leaves of torch tensors sharded over ranks: DTensor (FSDP2, tensor parallelism, both) and ShardedTensor.

A strided placement (FSDP2 over tensor parallelism) may give a rank several boxes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ckpt.state.boxes import Box, Replica
from ckpt.state.leaves.base import ArrayLeaf, LeafShard
from ckpt.state.leaves.sharded import ShardedLeaf, require_in_bounds
from ckpt.state.leaves.torch import as_leaf as leaf_of
from ckpt.state.leaves.torch import torch_attributes
from ckpt.state.mesh_boxes import MeshSplit, replica_on_mesh, shard_boxes
from ckpt.storage.base.checksums import checksum


def as_leaf(value: Any) -> ArrayLeaf:
    """Return the leaf of a DTensor or ShardedTensor; raise TypeError for one that is not plain memory."""
    return _of_dtensor(value) if hasattr(value, "device_mesh") else _of_sharded_tensor(value)


def _of_dtensor(value: Any) -> ArrayLeaf:
    placements, mesh, shape = value.placements, value.device_mesh, tuple(value.shape)
    local = value._local_tensor
    if local.requires_grad:
        local = local.detach()
    extent = tuple(local.shape)
    parts: list[LeafShard] = []
    if (coordinate := mesh.get_coordinate()) is not None:  # else this rank is not in the mesh
        position = _mesh_position(mesh, placements, tuple(coordinate))
        for box, within in shard_boxes(shape, position.mesh_shape, position.coordinate, position.splits):
            leaf = leaf_of(local if within.shape == extent else local[within.slices()])
            if leaf.shape != box.shape:
                raise TypeError(
                    f"a DTensor of shape {list(shape)} with {list(placements)} has a local tensor of shape {list(extent)}: "
                    "give DTensor.from_local the shape= and stride= of the whole tensor"
                )
            parts.append(LeafShard(leaf, box, position.replica))
    plain = parts[0].leaf if parts else leaf_of(local)
    return ShardedLeaf(value, "torch", shape, plain.dtype, plain.itemsize, parts, torch_attributes(value))


def _of_sharded_tensor(value: Any) -> ArrayLeaf:
    shape = tuple(value.size())
    parts = []
    for shard in value.local_shards():
        offset = tuple(shard.metadata.shard_offsets)
        parts.append(
            require_in_bounds(LeafShard(leaf_of(shard.tensor.detach()), Box(offset, tuple(shard.metadata.shard_sizes))), shape)
        )
    plain = parts[0].leaf if parts else leaf_of(torch.empty(0, dtype=value.dtype))
    return ShardedLeaf(value, "torch", shape, plain.dtype, plain.itemsize, parts)


def division_of_dtensor(value: Any) -> str:
    """Return the mesh and the placements of a DTensor as a text; "" if each rank has all of it."""
    return _division(value.device_mesh, tuple(value.placements))


@lru_cache(maxsize=1024)
def _division(mesh: Any, placements: tuple[Any, ...]) -> str:
    splits = [_mesh_split(placement) for placement in placements]
    if not any(splits):
        return ""
    mesh_digest = checksum(repr((tuple(mesh.mesh.shape), mesh.mesh.reshape(-1).tolist())).encode())
    return f"mesh {mesh_digest:016x} {splits}"


def replica_ranks(value: Any, owners: Collection[int]) -> tuple[int, ...] | None:
    """Return the ranks that have copies of this rank's shard of a DTensor if some are outside of its mesh, else None.

    owners: the ranks that have the tensor.

    Ranks outside of the mesh have the tensor on sibling meshes, made by slicing the same root mesh along the same axes. That
    happens under FSDP2 with tensor parallelism, to a parameter that tensor parallelism does not shard. None also where no root
    mesh is known that contains all owners.
    """
    mesh = value.device_mesh
    mesh_ranks = set(mesh.mesh.reshape(-1).tolist())
    root = _root_mesh(mesh)
    if mesh.get_coordinate() is None or root is None or mesh_ranks.issuperset(owners):
        return None
    coordinates = {int(root.mesh[at]): at for at in itertools.product(*map(range, root.mesh.shape))}
    if not mesh_ranks.issubset(coordinates) or not coordinates.keys() >= set(owners):
        return None
    varied = [axis for axis in range(root.mesh.ndim) if len({coordinates[rank][axis] for rank in mesh_ranks}) > 1]
    if len(mesh_ranks) != math.prod(root.mesh.shape[axis] for axis in varied):
        return None  # the mesh is not a slice of the root mesh along whole axes
    replica_ranks_here = _replica(mesh, tuple(mesh.get_coordinate()), tuple(value.placements)).ranks or ()
    replica_coordinates = {tuple(coordinates[rank][axis] for axis in varied) for rank in replica_ranks_here}
    return tuple(sorted(r for r in owners if tuple(coordinates[r][axis] for axis in varied) in replica_coordinates))


def _root_mesh(mesh: Any) -> Any:
    """Return the mesh of which this one is a slice; torch releases have different private functions for it."""
    if callable(find := getattr(mesh, "_get_root_mesh", None)):
        return find()
    resources = getattr(sys.modules["torch.distributed.device_mesh"], "_mesh_resources", None)
    return None if resources is None else resources.get_root_mesh(mesh)


class _MeshPosition(NamedTuple):
    """The position of this rank in a mesh, for tensors of the same placements."""

    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    splits: tuple[MeshSplit, ...]
    replica: Replica


@lru_cache(maxsize=1024)
def _mesh_position(mesh: Any, placements: tuple[Any, ...], at: tuple[int, ...]) -> _MeshPosition:
    """Return the position of the rank at coordinate `at`; cached because mesh lookups take longer than planning a tensor."""
    if any(p.is_partial() for p in placements):
        raise TypeError("a DTensor with a Partial placement is a sum that is still to be reduced: redistribute it first")
    return _MeshPosition(tuple(mesh.shape), at, tuple(map(_mesh_split, placements)), _replica(mesh, at, placements))


def _mesh_split(placement: Any) -> MeshSplit:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise TypeError(f"a DTensor with the placement {placement} is not supported: redistribute it to Shard or Replicate")
    return int(dim), int(getattr(placement, "split_factor", 1))


def _replica(mesh: Any, coordinate: tuple[int, ...], placements: Sequence[Any]) -> Replica:
    """Return which copy this rank has."""
    return replica_on_mesh(mesh.mesh, coordinate, tuple(p.is_replicate() for p in placements))
