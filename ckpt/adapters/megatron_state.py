"""The sharded state dict of Megatron-Core as a state of ckpt, and the targets of a load.

A step has {"tensors": {key: tensor}, "objects": {unique key: object}, "common": values of rank 0}. The names do not depend on
the parallelism. A tensor may list the layers of a model along its first axis, so a rank may have several boxes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from ckpt.adapters.megatron_values import decoded, encoded
from ckpt.format.manifest import Saved
from ckpt.state.boxes import Replica
from ckpt.state.leaves.sharded import Shard
from ckpt.state.tree import PerRank
from ckpt.storage.base.errors import InvalidArgument

_BoxKey = tuple[str, tuple[int, ...]]
"""The key of a tensor, and the offset of one box of it."""


class _ShardedBoxes(Shard):
    """Boxes of one tensor, each with the ranks that have copies of it."""

    def __init__(self, tensors: Sequence[Any], holders: Sequence[tuple[int, ...]]) -> None:
        first, rank = tensors[0], _rank()
        super().__init__([_local(t) for t in tensors], first.global_shape, [tuple(t.global_offset) for t in tensors])
        self._replicas = [Replica(ranks.index(rank), len(ranks), ranks) for ranks in holders]

    def replicas(self) -> list[Replica]:
        return self._replicas


def saved_state(sharded: Any, common: Any, of_all_ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the state that a save stores.

    sharded: the nested dict of the ShardedTensors and ShardedObjects of this rank.
    common: all other values.
    of_all_ranks: the ShardedTensors of each rank, without data.
    """
    holders: dict[_BoxKey, list[int]] = {}
    for rank, entries in enumerate(of_all_ranks):
        for key in dict.fromkeys(_box_key(entry) for entry in entries if isinstance(entry, ShardedTensor)):
            holders.setdefault(key, []).append(rank)
    tensors: dict[str, dict[_BoxKey, Any]] = {}
    objects = {}
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedTensor):
            tensors.setdefault(entry.key, {}).setdefault(_box_key(entry), entry)
        elif is_main_replica(_require_object(entry).replica_id):
            objects[entry.unique_key] = PerRank(encoded(entry.data, entry.unique_key))
    state: dict[str, Any] = {
        "tensors": {
            key: _ShardedBoxes(list(boxes.values()), [tuple(holders[box]) for box in boxes]) for key, boxes in tensors.items()
        },
        "objects": objects,
    }
    if _rank() == 0:
        state["common"] = PerRank(encoded(common, "common"))
    return state


class LoadTargets:
    """The ShardedTensors that a load fills, as an entry of its `like`.

    sharded: the nested dict of the ShardedTensors and ShardedObjects of this rank.
    """

    def __init__(self, sharded: Any) -> None:
        self._tensors: dict[str, list[Any]] = {}
        self._objects: list[str] = []
        self._converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry in nested_values(sharded):
            if isinstance(entry, ShardedTensor):
                entry.init_data("cpu")
                self._tensors.setdefault(entry.key, []).append(entry)
            else:
                self._objects.append(_require_object(entry).unique_key)

    def like(self) -> dict[str, Any]:
        """Return the `like` of a load."""
        return {"tensors": self, "objects": dict.fromkeys(self._objects), "common": None}

    def value(self, entry: Any, objects: dict[str, Any]) -> Any:
        """Return the loaded value of a ShardedTensor or ShardedObject."""
        return entry.data if isinstance(entry, ShardedTensor) else decoded(objects[entry.unique_key])

    def state_dict(self) -> dict[str, Any]:
        """Return the boxes of each tensor of this rank."""
        return self.state_dict_like({}, True)

    def state_dict_like(self, saved: Any, everything: bool) -> dict[str, Any]:
        """Return the boxes to fill: within the saved shape, and of the saved type."""
        self._converted = []
        found = {}
        for key, tensors in self._tensors.items():
            boxes = [box for tensor in tensors for box in self._box(tensor, saved.get(key))]
            if boxes:
                stored = saved.get(key)
                shape = (
                    stored.shape if isinstance(stored, Saved) and tensors[0].allow_shape_mismatch else tensors[0].global_shape
                )
                found[key] = Shard([local for local, _ in boxes], shape, [offset for _, offset in boxes])
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what was loaded in another type."""
        for loaded, target in self._converted:
            target.copy_(loaded)

    def _box(self, tensor: Any, saved: Any) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """Yield the local tensor to fill and its offset; nothing if it lies beyond the saved shape."""
        local, offset = _local(tensor), tuple(tensor.global_offset)
        if not isinstance(saved, Saved):
            yield local, offset
            return
        if tensor.allow_shape_mismatch and len(saved.shape) == local.dim():
            for axis, (start, length) in enumerate(zip(offset, saved.shape, strict=True)):
                if start >= length:
                    return
                local = local.narrow(axis, 0, min(local.shape[axis], length - start))
        if str(local.dtype) != f"torch.{saved.dtype}" and isinstance(dtype := getattr(torch, saved.dtype, None), torch.dtype):
            self._converted.append((torch.empty_like(local, dtype=dtype), local))
            local = self._converted[-1][0]
        yield local, offset


def _local(tensor: Any) -> Any:
    """Return the data of a ShardedTensor with the axes of the global tensor."""
    return tensor.data.detach()[(None,) * tensor.prepend_axis_num]


def _box_key(tensor: Any) -> _BoxKey:
    return tensor.key, tuple(tensor.global_offset)


def _require_object(entry: Any) -> Any:
    if isinstance(entry, ShardedObject):
        return entry
    raise InvalidArgument(
        f"a {type(entry).__name__} of a sharded state dict is not supported: use ShardedTensor or ShardedObject"
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
