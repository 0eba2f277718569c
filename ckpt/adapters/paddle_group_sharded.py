"""What a rank has of a model under `paddle.distributed.sharding.group_sharded_parallel`, at the levels os, os_g and p_g_os.

At os and os_g (stage 2), each parameter belongs to one rank of the group, which alone has the optimizer's state of it. At
p_g_os (stage 3), a rank has a slice of each flattened parameter of more than `segment_size` elements, and of its state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base.framework import EagerParamBase

from ckpt.adapters.paddle_layout import AXES, OwnedParameter
from ckpt.state.leaves.paddle_optimizer import parameters_of
from ckpt.storage.base.errors import InvalidArgument

_SLICE = "slice@"
"""What Paddle puts before the name of a parameter for the slice of it."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements [start, stop) of a flattened parameter, in the first elements of a tensor."""

    tensor: Any
    start: int
    stop: int


class GroupSharding:
    """One of Paddle's wrappers: a GroupShardedOptimizerStage2 or a GroupShardedStage3."""

    def __init__(self, wrapper: Any, hcg: Any) -> None:
        self._wrapper = wrapper
        self._slices = getattr(wrapper, "_param2buffer", {})
        """By the name of a parameter: the first element and the end of the slice of each rank, with the padding."""
        if getattr(wrapper, "offload", False) or getattr(wrapper, "_offload", False):
            raise InvalidArgument("ModelState: group_sharded_parallel(offload=True) is not supported: use it without offload")
        for axis in ("model", "pipe", "sep"):
            if hcg is not None and axis in hcg.topology().get_hybrid_group_names() and hcg.topology().get_dim(axis) > 1:
                raise InvalidArgument(
                    f"ModelState: group_sharded_parallel with {axis} parallelism is not supported: use sharding stage 1, "
                    "which is sharding_degree of fleet's hybrid_configs"
                )

    def topology(self) -> tuple[Any, int]:
        """Return a CommunicateTopology with the axes along which the ranks differ, and the rank of this process."""
        group, others = self._wrapper._group, self._wrapper._dp_group
        here, data = group.ranks[group.rank], [group.ranks[group.rank]] if others is None else others.ranks
        size = paddle.distributed.get_world_size()
        for axes in (AXES, ("sharding", *(axis for axis in AXES if axis != "sharding"))):
            degrees = {"data": len(data), "sharding": group.nranks}
            found = paddle.distributed.fleet.base.topology.CommunicateTopology(axes, [degrees.get(axis, 1) for axis in axes])
            fits = list(group.ranks) in found.get_comm_list("sharding") and list(data) in found.get_comm_list("data")
            if fits and found.world_size() == size:
                return found, here
        raise InvalidArgument(
            f"ModelState: the group {list(group.ranks)} and the dp_group {list(data)} of group_sharded_parallel are not all of "
            f"the {size} ranks: give group_sharded_parallel a dp_group, so that they are"
        )

    def slice_of(self, parameter: Any) -> Slice | None:
        """Return the slice of a parameter that this rank has; None if it has the whole one."""
        if parameter.name not in self._slices or parameter.status == "all":  # gathered, as frozen ones are after a step
            return None
        return Slice(parameter.fw_storage, *self._range(parameter))

    def owned_parts(self, optimizer: Any, parameters: dict[str, Any]) -> Iterator[OwnedParameter]:
        """Yield the parameters of which this rank has the optimizer's state.

        parameters: those of the layer by Paddle's names.
        """
        rank_of = getattr(self._wrapper, "param2rank", None)
        for known in parameters_of(optimizer):
            name = known.name.removeprefix(_SLICE)
            parameter = parameters.get(name, known)
            if parameter.stop_gradient:
                continue
            if rank_of is not None:
                if rank_of[name] == self._wrapper._rank:
                    yield OwnedParameter(name, parameter, is_sharded=True)
            elif name not in self._slices:
                yield OwnedParameter(name, parameter, is_sharded=False)
            else:
                yield OwnedParameter(name, self._slice_parameter(parameter), True, slice=self._range(parameter))

    def _range(self, parameter: Any) -> tuple[int, int]:
        """Return the slice of this rank without the padding at the end."""
        start, stop = self._slices[parameter.name][self._wrapper._rank]
        size = math.prod(parameter.shape)
        return min(start, size), min(stop, size)

    def _slice_parameter(self, parameter: Any) -> Any:
        if parameter.fw_storage is not None:
            return parameter.fw_storage
        start, stop = self._slices[parameter.name][self._wrapper._rank]
        return EagerParamBase(shape=[stop - start], dtype=parameter.dtype, name=_SLICE + parameter.name)
