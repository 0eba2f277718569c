"""Where the flat partitions of DeepSpeed ZeRO lie in the parameters of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.state.leaves.sharded import Shard
from ckpt.storage.base.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


class Range(NamedTuple):
    """The elements of one parameter that this rank has."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    first: int
    """The index of the first element in the flattened parameter."""
    size: int
    start: int
    """The index of the first element in the flat partition."""

    def shard(self, flat: torch.Tensor) -> Shard:
        """Return these elements of a flat tensor of this rank, as a part of the whole parameter."""
        part = flat.detach().narrow(0, self.start, self.size)
        if self.size == math.prod(self.shape):  # a save then makes one leaf instead of two
            return Shard(part.view(self.shape), self.shape, (0,) * len(self.shape))
        return Shard(part, self.shape, flat=self.first)


@dataclass(frozen=True)
class Partition:
    """This rank's part of the master weights of a group of parameters, which the optimizer updates as one flat tensor."""

    weights: torch.Tensor
    ranges: dict[Any, Range]
    """By parameter, in the order of the group."""
    options: dict[str, Any]
    """The entry of the optimizer's `param_groups`."""


def partitions_of(optimizer: Any) -> list[Partition]:
    """Return the partitions of an optimizer of ZeRO stage 1, 2 or 3, or of the BF16_Optimizer.

    Raises InvalidArgument for any other optimizer that keeps its own copy of the weights.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(_partitions_of_stage_3(optimizer))
    for names in _FLAT_NAMES:
        if all(hasattr(optimizer, name) for name in names):
            return list(_partitions_of_groups(optimizer, *(getattr(optimizer, name) for name in names)))
    raise InvalidArgument(
        f"ckpt can't name the weights of DeepSpeed's {type(optimizer).__name__}: set stage 1, 2 or 3 in zero_optimization"
    )


_FLAT_NAMES = (("bit16_groups", "bit16_groups_flat"), ("bf16_groups", "bf16_groups_flat"))
"""The attributes of stages 1 and 2, and of the BF16_Optimizer: the parameters of each group, and their flat memory."""


def _partitions_of_groups(optimizer: Any, groups: Sequence[Any], flat_groups: Sequence[Any]) -> Iterator[Partition]:
    """Yield the partition of each group. The ranks divide the flat memory of all its parameters equally."""
    import deepspeed.comm as dist

    for number, (parameters, flat) in enumerate(zip(groups, flat_groups, strict=True)):
        options = optimizer.optimizer.param_groups[number]
        (weights,) = options["params"]
        begin = dist.get_rank(group=optimizer.real_dp_process_group[number]) * weights.numel()
        end = begin + weights.numel()
        ranges = {}
        for parameter in parameters:
            if parameter.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                raise InvalidArgument(
                    "a parameter is not in the flat memory of DeepSpeed: call reload_states() of the engine first"
                )
            at = parameter.storage_offset() - flat.storage_offset()
            first, last = max(at, begin), min(at + parameter.numel(), end)
            size = max(0, last - first)
            ranges[parameter] = Range(tuple(parameter.shape), first - at if size else 0, size, first - begin if size else 0)
        yield Partition(weights, ranges, options)


def _partitions_of_stage_3(optimizer: Any) -> Iterator[Partition]:
    """Yield the partition of each subgroup. The ranks divide each parameter equally."""
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        ranges = {}
        start = 0
        for parameter in optimizer.fp16_groups[number]:
            ranges[parameter] = _range_in_parameter(parameter, start)
            start += parameter.partition_numel()
        if start != weights.numel():
            raise InvalidArgument(
                f"a partition of DeepSpeed has {weights.numel()} elements in memory instead of {start}: ckpt does not save "
                "partitions on NVMe; offload to the CPU"
            )
        yield Partition(weights, ranges, optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]])


def _range_in_parameter(parameter: Any, start: int) -> Range:
    import deepspeed.comm as dist

    part = parameter.partition_numel()
    first = dist.get_rank(group=parameter.ds_process_group) * part
    size = max(0, min(part, parameter.ds_numel - first))
    return Range(tuple(parameter.ds_shape), first if size else 0, size, start)


def parameter_value(parameter: Any) -> Any:
    """Return the value of a parameter without master weights: a tensor, or this rank's part of it under stage 3."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    return _range_in_parameter(parameter, 0).shard(parameter.ds_tensor)


def write_model_weights(optimizer: Any) -> None:
    """Copy the master weights into the parameters, which all ranks gather. All ranks call this together."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    for master, flat, parts in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, optimizer.fp16_partitioned_groups,
        strict=True,
    ):  # fmt: skip
        if flat.numel():
            flat.data.copy_(master.data)
        for part, values in zip(parts, optimizer.unflatten(flat, parts), strict=True):
            part.data = values.data
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
