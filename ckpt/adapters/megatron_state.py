"""The sharded state dict of Megatron-Core as a state of ckpt, and the targets of a load.

A step has {"tensors": {key: tensor}, "objects": {unique key: object}, "common": values of rank 0}. The names do not depend on
the parallelism. A tensor may list the layers of a model along its first axis, so a rank may have several boxes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, is_main_replica

from ckpt.adapters.megatron_values import decoded, encoded
from ckpt.format.manifest import Saved
from ckpt.state.boxes import Replica
from ckpt.state.leaves.sharded import Shard
from ckpt.state.leaves.torch import dtype_of_name
from ckpt.state.tree import PerRank
from ckpt.storage.base.errors import InvalidArgument

_BoxKey = tuple[str, tuple[int, ...]]
"""The key of a tensor, and the offset of one box of it."""


class _ShardedBoxes(Shard):
    """Boxes of one tensor, each with the ranks that have copies of it."""

    def __init__(self, boxes: Sequence[tuple[Any, torch.Tensor]], owners: Sequence[tuple[int, ...]]) -> None:
        """boxes: each ShardedTensor, and the memory with its values. owners: the ranks with copies of each box."""
        first, rank = boxes[0][0], _rank()
        super().__init__([local for _, local in boxes], first.global_shape, [tuple(t.global_offset) for t, _ in boxes])
        self._replicas = [Replica(ranks.index(rank), len(ranks), ranks) for ranks in owners]

    def replicas(self) -> list[Replica]:
        return self._replicas


def saved_state(sharded: Any, common: Any, of_all_ranks: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the state that a save stores.

    sharded: the nested dict of the ShardedTensors and ShardedObjects of this rank.
    common: all other values.
    of_all_ranks: the ShardedTensors and ShardedObjects of each rank, without data.
    """
    owners: dict[_BoxKey, list[int]] = {}
    for rank, described in enumerate(of_all_ranks):
        for key in dict.fromkeys(_box_key(entry) for entry in described if isinstance(entry, ShardedTensor)):
            owners.setdefault(key, []).append(rank)
    entries: dict[_BoxKey, Any] = {}
    objects = {}
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedTensor):
            entries.setdefault(_box_key(entry), entry)
        elif is_main_replica(_require_object(entry).replica_id):
            objects[entry.unique_key] = PerRank(encoded(entry.data, entry.unique_key))
    memory = {box: _local(entry) for box, entry in entries.items()}
    memory.update({box: memory[box].clone() for box in _overlapping(memory)})
    tensors: dict[str, list[_BoxKey]] = {}
    for box, entry in entries.items():
        tensors.setdefault(entry.key, []).append(box)
    state: dict[str, Any] = {
        "tensors": {
            key: _ShardedBoxes([(entries[box], memory[box]) for box in boxes], [tuple(owners[box]) for box in boxes])
            for key, boxes in tensors.items()
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

    def state_dict_like(self, saved: dict[str, Saved], everything: bool) -> dict[str, Any]:
        """Return the boxes to fill: within the saved shape, and of the saved type."""
        self._converted = []
        boxes: dict[_BoxKey, torch.Tensor] = {}
        copies = []
        for key, tensors in self._tensors.items():
            for local, offset in (found for tensor in tensors for found in self._box(tensor, saved.get(key))):
                if (first := boxes.setdefault((key, offset), local)) is not local:
                    copies.append((first, local))
        shared = {box: boxes[box] for box in _overlapping(boxes)}
        boxes.update({box: torch.empty_like(local) for box, local in shared.items()})
        self._converted = [*((boxes[box], local) for box, local in shared.items()), *copies, *self._converted]
        shards: dict[str, list[_BoxKey]] = {}
        for box in boxes:
            shards.setdefault(box[0], []).append(box)
        return {
            key: Shard([boxes[box] for box in of_key], self._shape(key, saved.get(key)), [box[1] for box in of_key])
            for key, of_key in shards.items()
        }

    def _shape(self, key: str, saved: Saved | None) -> tuple[int, ...]:
        tensor = self._tensors[key][0]
        return saved.shape if isinstance(saved, Saved) and tensor.allow_shape_mismatch else tensor.global_shape

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what was loaded in another type, or to other memory."""
        for loaded, target in self._converted:
            target.copy_(loaded)

    def _box(self, tensor: Any, saved: Saved | None) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
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
        if str(local.dtype) != f"torch.{saved.dtype}" and (dtype := dtype_of_name(saved.dtype)):
            self._converted.append((torch.empty_like(local, dtype=dtype), local))
            local = self._converted[-1][0]
        yield local, offset


def clear_padding(state: Any) -> None:
    """Set the padding in a state dict of a distributed optimizer to zero, where Megatron-Core leaves memory as it is."""
    for entry in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        clear_padding(entry)
    if isinstance(state, dict) and isinstance(mark := state.get("padding"), LocalNonpersistentObject) and mark.unwrap() is True:
        for entry in state.values():
            if isinstance(entry, ShardedTensor):
                entry.data.zero_()


def _overlapping(boxes: Mapping[_BoxKey, torch.Tensor]) -> list[_BoxKey]:
    """Return the boxes that share memory with one before them, as those of the model and of an optimizer in float32 do."""
    found: list[_BoxKey] = []
    end: dict[torch.device, int] = {}
    for start, _, key in sorted((t.data_ptr(), number, key) for number, (key, t) in enumerate(boxes.items()) if t.numel()):
        device = boxes[key].device
        if start < end.get(device, 0):
            found.append(key)
        else:
            end[device] = start + boxes[key].numel() * boxes[key].element_size()
    return found


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
