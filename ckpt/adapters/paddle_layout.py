"""Which box of each tensor a rank of Paddle's hybrid parallelism has, and which ranks have the same one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle

from ckpt.state.boxes import Box, Replica, flat_boxes, whole_box
from ckpt.state.leaves.sharded import Shard
from ckpt.storage.base.errors import InvalidArgument

_SHARED = "shared_layers."
_COUNTS = ("pow", "product", "rho")
"""Parts of the names of entries that count steps: one number for the whole parameter, whatever its shape."""


AXES = ("data", "pipe", "sharding", "sep", "model")
"""The axes of a hybrid parallelism, in Paddle's own order."""


def unwrap_layer(layer: Any) -> tuple[Any, Any]:
    """Return the layer inside of Paddle's wrappers, whose names are the model's, and the GroupShardedStage3 among them."""
    sharded = None
    while type(layer).__module__.startswith("paddle.distributed"):
        if type(layer).__name__ == "GroupShardedStage3":
            sharded = layer
        parts = vars(layer)["_sub_layers"]
        inner = parts.get(
            "_layers", parts.get("_layer")
        )  # of fleet.distributed_model and DataParallel; of group_sharded_parallel
        if not isinstance(inner, paddle.nn.Layer):
            break
        layer = inner
    return layer, sharded


def tensors_of(layer: Any) -> dict[str, Any]:
    """Return the tensors of a layer under the names that they have without pipeline parallelism.

    In an interleaved pipeline, layer 7 is layer `7 - start` of the chunk `start`; a shared layer is in its chunk, too.
    """
    state = layer.state_dict()
    if getattr(layer, "_num_virtual_pipeline_stages", 1) == 1:
        return dict(state)
    found = {name: tensor for name, tensor in state.items() if name.startswith(_SHARED)}
    shared = {id(tensor) for tensor in found.values()}
    for name, tensor in state.items():
        start, _, inner = name.partition(".")
        index, _, rest = inner.partition(".")
        if start.isdigit() and index.isdigit():
            name = f"{int(start) + int(index)}.{rest}"
        if id(tensor) not in shared:
            found[name] = tensor
    return found


def unwrap_optimizer(optimizer: Any) -> tuple[Any, Any]:
    """Return the optimizer inside of wrappers, and the wrapper that shards it: of stage 1 or stage 2, or None."""
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer as sharding

    found = None
    while True:
        inner = vars(optimizer).get("_inner_opt")
        if isinstance(optimizer, (sharding.DygraphShardingOptimizer, sharding.DygraphShardingOptimizerV2)):
            found = optimizer
        elif type(optimizer).__name__ == "GroupShardedOptimizerStage2":
            found, inner = optimizer, optimizer._optim
        elif isinstance(optimizer, paddle.optimizer.Optimizer):
            break
        if inner is None:
            raise InvalidArgument(
                f"ModelState: a {type(optimizer).__name__} is not an optimizer of Paddle: give one of paddle.optimizer"
            )
        optimizer = inner
    if getattr(found, "tensor_fusion", False):
        raise InvalidArgument(
            f"ModelState: {type(found).__name__} with tensor_fusion divides its state in a way that ckpt does not know: turn "
            "tensor_fusion off"
        )
    return optimizer, found


def _sequence_parallel_axes(layer: Any) -> dict[int, int]:
    """Return by its id the axis of each parameter of sequence-parallel layers, which Paddle 3.0 does not note in split_axis."""
    axes = {"ColumnSequenceParallelLinear": {"weight": 1, "bias": 0}, "RowSequenceParallelLinear": {"weight": 0}}
    return {
        id(getattr(part, name)): axis
        for part in layer.sublayers(include_self=True)
        for name, axis in axes.get(type(part).__name__, {}).items()
    }


class Layout:
    """The ranks of a hybrid parallelism and what of the model each has."""

    def __init__(self, topology: Any, rank: int, layer: Any) -> None:
        """topology: a CommunicateTopology; None if all ranks have the same."""
        self._topology = topology
        self._layer = layer
        self._known_axes = _sequence_parallel_axes(layer)
        if topology is None:
            return
        self._rank = rank
        self._names = list(self._topology.get_hybrid_group_names())
        self._here = dict(zip(self._names, self._topology.get_coord(self._rank), strict=True))

    def shard(self, name: str, tensor: Any, is_stored_whole: bool = False) -> Any:
        """Return a tensor of the model with the box that this rank has, and the ranks that have the same box."""
        if self._topology is None:
            return tensor
        box, shape = self.box(tensor)
        return Shard(tensor, shape, box.offset, replica=self.replica(name, tensor, (), is_stored_whole))

    def box(self, tensor: Any) -> tuple[Box, tuple[int, ...]]:
        """Return the box of a parameter that this rank has, and the shape of the whole parameter."""
        shape = list(tensor.shape)
        offset = [0] * len(shape)
        if (axis := self._split_axis(tensor)) is not None:
            degree = self._topology.get_dim("model")
            offset[axis] = self._here["model"] * shape[axis]
            shape[axis] *= degree
        return Box(tuple(offset), tuple(tensor.shape)), tuple(shape)

    def replica(self, name: str, tensor: Any, fixed: tuple[str, ...], is_stored_whole: bool = False) -> Replica:
        """Return this rank among those that have the same box.

        name: the name of the parameter in the model.
        fixed: further axes of the parallelism along which the ranks differ, such as "sharding".
        """
        axes = [*fixed, *([] if self._split_axis(tensor) is None else ["model"])]
        stages = self._stages(name)
        ranks = []
        for rank in range(self._topology.world_size()):
            there = dict(zip(self._names, self._topology.get_coord(rank), strict=True))
            if all(there[axis] == self._here[axis] for axis in axes) and there.get("pipe", 0) in stages:
                ranks.append(rank)
        return Replica(ranks.index(self._rank), len(ranks), tuple(ranks), is_stored_whole)

    def _split_axis(self, tensor: Any) -> int | None:
        """Return the axis along which tensor parallelism divides a parameter; None if all ranks have the whole one."""
        if self._topology is None or not getattr(tensor, "is_distributed", False) or self._topology.get_dim("model") == 1:
            return None
        axis = getattr(tensor, "split_axis", self._known_axes.get(id(tensor)))
        if axis is None:
            raise InvalidArgument(
                f"ModelState: the parameter {tensor.name} has is_distributed and no split_axis, so its box in the whole one "
                "is unknown: set split_axis to the axis along which the ranks divide it"
            )
        return int(axis)

    def _stages(self, name: str) -> set[int]:
        """Return the pipeline stages that have a parameter: one, or those of a shared layer."""
        here = self._here.get("pipe", 0)
        layer = self._layer
        if not name.startswith(_SHARED) or not hasattr(layer, "_layers_desc"):
            return {here}
        key = name.removeprefix(_SHARED).partition(".")[0]
        found = {here}
        for index, description in enumerate(layer._layers_desc):
            if getattr(description, "layer_name", None) == key:
                found.add(layer.get_stage_from_index(index))
        return found

    @property
    def is_known(self) -> bool:
        """Whether the ranks differ."""
        return self._topology is not None


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """A parameter of which this rank has the optimizer's state."""

    name: str
    """Paddle's name of the parameter."""
    parameter: Any
    """What the optimizer knows: the parameter, or a slice of it."""
    is_sharded: bool
    """Whether the ranks of the axis "sharding" have the state of different parameters, or of different slices."""
    slice: tuple[int, int] | None = None
    """First element and end of the slice in the flattened local parameter; None for all of it."""


def owned_parts(optimizer: Any, sharding: Any) -> Iterator[OwnedParameter]:
    """Yield the parameters of which this rank has the optimizer's state. sharding: the wrapper that shards it, or None."""
    buffers = getattr(sharding, "_comm_buffer_list", None) if sharding is not None else None
    if not buffers:
        from ckpt.state.leaves.paddle_optimizer import parameters_of

        for parameter in parameters_of(optimizer):
            yield OwnedParameter(parameter.name, parameter, is_sharded=sharding is not None)
        return
    for buffer in buffers:
        for name, view in buffer._sharding_param_grad_view.items():
            size = math.prod(view._param.shape)
            start, stop = view._param_begin - view._index, min(view._param_end - view._index, size)
            if view._param_begin >= view._param_end:
                continue
            slice_parameter = sharding._slice_params[name]
            view.fill_slice_param(slice_parameter)
            yield OwnedParameter(name, slice_parameter, is_sharded=True, slice=(start, max(start, stop)))


def flat_shard(tensor: Any, part: tuple[int, int], box: Box, shape: tuple[int, ...], replica: Replica) -> Shard:
    """Return the shard of a slice of a flattened box.

    tensor: its first elements are the slice.
    part: the first element and the end of the slice in the flattened box.
    box: the box of the whole tensor that was flattened.
    shape: of the whole tensor.
    """
    boxes = flat_boxes(box.shape, *part)
    views, at = [], 0
    for one in boxes:
        view = tensor.detach()[at : at + one.size].reshape(list(one.shape))
        if view.data_ptr() != tensor.data_ptr() + at * tensor.element_size():
            raise InvalidArgument(
                "ModelState: Paddle's views copy, so a load could not fill them: set FLAGS_use_stride_kernel=1"
            )
        views.append(view)
        at += one.size
    if not boxes:  # only the padding of the buffer
        return Shard(tensor.detach()[:0].reshape(_empty(shape)), shape, (0,) * len(shape))
    return Shard(views, shape, [one.moved(box.offset).offset for one in boxes], replica=replica)


class OptimizerPart:
    """The optimizer's state of one parameter on this rank."""

    def __init__(self, owned: OwnedParameter, name: str, whole: Any, layout: Layout) -> None:
        """name: the name of the parameter in the model. whole: the local parameter that is not sliced."""
        self.name = name
        self.parameter = owned.parameter
        self._slice = owned.slice
        self._fixed = ("sharding",) if owned.is_sharded else ()
        self._whole, self._layout = whole, layout

    def stores(self, key: str, tensor: Any) -> bool:
        """Return whether a save stores an entry: of a sliced parameter, the first slice stores the counts."""
        return self._slice is None or self._slice[0] == 0 or not self._is_count(key, tensor)

    def shard(self, key: str, tensor: Any) -> Any:
        """Return an entry of the optimizer with the boxes that this rank has."""
        if not self._layout.is_known:
            return tensor
        replica = self._layout.replica(self.name, self._whole, self._fixed)
        if self._is_count(key, tensor):
            replica = self._layout.replica(self.name, _Unsplit, self._fixed)
            return Shard(tensor, tensor.shape, (0,) * len(tensor.shape), replica=replica)
        box, shape = self._layout.box(self._whole)
        if self._slice is None:
            return Shard(tensor, shape, box.offset, replica=replica)
        return flat_shard(tensor, self._slice, box, shape, replica)

    def _is_count(self, key: str, tensor: Any) -> bool:
        local = list(self._whole.shape) if self._slice is None else [self._slice[1] - self._slice[0]]
        shape = list(tensor.shape)
        return math.prod(shape) == 1 and (any(part in key for part in _COUNTS) or shape != local)


class _Unsplit:
    """Stands for a parameter that tensor parallelism does not divide."""

    is_distributed = False


def _empty(shape: tuple[int, ...]) -> list[int]:
    return [0, *whole_box(shape).shape[1:]]
