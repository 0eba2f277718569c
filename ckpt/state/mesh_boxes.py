"""Which boxes of an array a rank of a mesh has, by the placement along each dimension of the mesh.

Each axis is divided by the rule of `torch.chunk`, which torch and Paddle use, from the leftmost mesh dimension to the
rightmost. A split factor (strided placements of torch) may give a rank several runs of indices of one axis, and so several
boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ckpt.state.boxes import Box, Replica

IndexRun = tuple[int, int]
"""First index and length, along one axis."""

MeshSplit = tuple[int, int] | None
"""How a mesh dimension shards an array: (axis, split factor); None if it replicates."""


@lru_cache(maxsize=4096)
def shard_boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], splits: tuple[MeshSplit, ...]
) -> list[tuple[Box, Box]]:
    """Return the boxes of a global array at one coordinate of a mesh, each with its box in the local tensor.

    shape: that of the global array. splits: for each dimension of the mesh, how it shards the array.
    """
    runs: list[list[IndexRun]] = [[(0, n)] for n in shape]
    for cut, size, at in zip(splits, mesh_shape, coordinate, strict=True):
        if cut is not None:
            axis, factor = cut
            runs[axis] = [run for piece in _split_runs(runs[axis], factor) for run in _chunk_runs(piece, size, at)]
    merged = [_merge_runs(r) for r in runs]
    if not all(merged):
        return []
    local = [list(itertools.accumulate((n for _, n in axis), initial=0)) for axis in merged]
    found = []
    for pick in itertools.product(*(range(len(axis)) for axis in merged)):
        chosen = [axis[i] for axis, i in zip(merged, pick, strict=True)]
        extent = tuple(n for _, n in chosen)
        found.append((
            Box(tuple(o for o, _ in chosen), extent),
            Box(tuple(starts[i] for starts, i in zip(local, pick, strict=True)), extent),
        ))  # fmt: skip
    return found


def _split_runs(runs: list[IndexRun], count: int) -> list[list[IndexRun]]:
    return [runs] if count == 1 else [_chunk_runs(runs, count, i) for i in range(count)]


def _chunk_runs(runs: list[IndexRun], count: int, index: int) -> list[IndexRun]:
    """Return chunk `index` of `count` by the rule of torch.chunk: all have the rounded-up size except the last ones."""
    total = sum(n for _, n in runs)
    step = -(-total // count)
    low, high = min(index * step, total), min((index + 1) * step, total)
    found = []
    at = 0
    for start, length in runs:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            found.append((start + first - at, last - first))
        at += length
    return found


def _merge_runs(runs: list[IndexRun]) -> list[IndexRun]:
    """Return the runs with adjacent ones joined."""
    found: list[IndexRun] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def replica_on_mesh(ranks: Any, coordinate: tuple[int, ...], is_replicated: Sequence[bool]) -> Replica:
    """Return which copy a rank has; the ranks along the replicating mesh dimensions have copies of one shard.

    ranks: the mesh as an array of ranks, of numpy or torch.
    is_replicated: whether each mesh dimension replicates.
    """
    index = tuple(slice(None) if copies else at for copies, at in zip(is_replicated, coordinate, strict=True))
    copies = tuple(sorted(ranks[index].reshape(-1).tolist()))
    return Replica(copies.index(int(ranks[coordinate])), len(copies), copies)
