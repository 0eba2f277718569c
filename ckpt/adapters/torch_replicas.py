"""Torch tensors with the ranks of their replicas, where neither their type nor the rules for plain arrays determine these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckpt.adapters.torch_experts import model_ranks, own_rank
from ckpt.state.boxes import Replica
from ckpt.state.leaves.sharded import Shard


class ReplicatedShard(Shard):
    """A tensor or DTensor, and the ranks that have replicas of this rank's part of it, this rank included."""

    def __init__(
        self, tensor: Any, local: list[Any], shape: Sequence[int], offset: list[tuple[int, ...]], ranks: tuple[int, ...],
        is_stored_whole: bool,
    ) -> None:  # fmt: skip
        super().__init__(local, shape, offset, replica=Replica(ranks.index(own_rank()), len(ranks), ranks, is_stored_whole))
        self.tensor = tensor


def with_replica_ranks(value: Any, owners: Sequence[int] | None, is_stored_whole: bool = False) -> Any:
    """Return a tensor with the ranks of its replicas, if neither its type nor the rules for plain arrays determine them.

    owners: the ranks that have the tensor; None means all.
    is_stored_whole: whether the replicas may differ, so that the first rank stores all of its replica.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "device_mesh"):
        if owners is None:
            return value
        return ReplicatedShard(value, [value], value.shape, [(0,) * value.dim()], tuple(owners), is_stored_whole)
    from ckpt.state.leaves import dtensor

    ranks = dtensor.replica_ranks(value, model_ranks("auto") if owners is None else owners)
    parts = [] if ranks is None else dtensor.as_leaf(value).shards() or []
    if ranks is None or not parts:
        return value
    return ReplicatedShard(
        value, [p.leaf.value for p in parts], value.shape, [p.box.offset for p in parts], ranks, is_stored_whole
    )


def without_replica_ranks(value: Any) -> Any:
    """Return the tensor of a `ReplicatedShard`, and any other value as it is."""
    return value.tensor if isinstance(value, ReplicatedShard) else value


def map_nested(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with `change` applied to each entry."""
    if isinstance(value, dict):
        return {k: map_nested(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_nested(v, change) for v in value)
    return change(value)
