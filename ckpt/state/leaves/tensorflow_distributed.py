"""Leaves of TensorFlow variables that are divided over devices: those of tf.distribute that replicas sum up, and DTensors."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from ckpt.state.boxes import Box
from ckpt.state.dtype_names import dtype_name, numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf, LeafShard
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.state.leaves.sharded import ShardedLeaf

# --- variables of tf.distribute that are combined when they are read -----------------------------------------------


def replicas_of(value: object) -> tuple[Any, ...]:
    """Return the variables of this process behind an ON_READ variable of tf.distribute; none for any other value."""
    if getattr(value, "synchronization", None) != tf.VariableSynchronization.ON_READ:
        return ()
    return tuple(getattr(value, "values", ()))


def require_aggregation(value: Any) -> None:
    """Raise TypeError for an ON_READ variable that has no value of its own, only one on each replica."""
    if replicas_of(value) and _aggregation(value) == "NONE":
        raise TypeError(
            "each replica has a value of its own: give the variable an aggregation=, or store its `values` as a list"
        )


def assign_to_replicas(value: Any, array: np.ndarray[Any, Any]) -> None:
    """Give the replicas values of which the combination is `array`, exactly.

    A sum is given to the first replica and zeros to the others: TensorFlow itself would divide it, and lose the rest of an
    integer.
    """
    replicas = replicas_of(value)
    first = getattr(value.distribute_strategy.extended, "_id_in_cluster", 0) == 0
    for number, replica in enumerate(replicas):
        whole = _aggregation(value) != "SUM" or (first and number == 0)
        replica.assign(array if whole else np.zeros_like(array))


def _aggregation(value: Any) -> str:
    return str(value.aggregation.name)


# --- DTensors ------------------------------------------------------------------------------------------------------


def layout_of(value: Any) -> Any:
    """Return the layout of a DTensor, None for other tensors and variables."""
    if "CUSTOM" not in str(getattr(value, "device", "")):
        return None
    return value.layout if isinstance(value, tf.Variable) else _dtensor().fetch_layout(value)


class DTensorLeaf(ShardedLeaf):
    """A DTensor over several devices of this process, as its shards."""

    __slots__ = ("_layout",)

    def __init__(self, value: Any, layout: Any) -> None:
        mesh = layout.mesh
        if mesh.num_local_devices() != mesh.size and not layout.is_fully_replicated():
            raise TypeError("a DTensor over several processes: store the parts of dtensor.unpack() as a ckpt.Shard")
        self._layout = layout
        tensor = value.read_value() if isinstance(value, tf.Variable) else value
        parts: dict[Box, LeafShard] = {}
        for box, part in zip(_boxes(layout, value.shape), _dtensor().unpack(tensor), strict=True):
            if box not in parts:
                parts[box] = LeafShard(_HostShard(np.asarray(part)), box)
        dtype = np.dtype(value.dtype.as_numpy_dtype)
        attributes = {"variable": True} if isinstance(value, tf.Variable) else {}
        shape = tuple(value.shape)
        super().__init__(value, "tensorflow", shape, dtype_name(dtype), dtype.itemsize, list(parts.values()), attributes)

    def identity(self) -> tuple[str, int]:
        return ("tensorflow", id(self.value))

    def target(self) -> ArrayLeaf:
        return _DTensorTarget(self, self._layout)


class _HostShard(NumpyLeaf):
    """One shard as a host array, whose buffer TensorFlow does not change while the array exists."""

    kind = "tensorflow"
    can_alias = False

    __slots__ = ()

    def is_immutable(self) -> bool:
        return True


class _DTensorTarget(ShardedLeaf):
    """Bytes on the host for each shard, which `finish` gives to the variable, or of which it makes a new DTensor."""

    __slots__ = ("_layout",)

    def __init__(self, like: ShardedLeaf, layout: Any) -> None:
        dtype = numpy_dtype(like.dtype)
        parts = [LeafShard(NumpyLeaf(np.empty(part.box.shape, dtype)), part.box) for part in like.shards()]
        super().__init__(like.value, "tensorflow", like.shape, like.dtype, like.itemsize, parts)
        self._layout = layout

    def finish(self) -> Any:
        arrays = {part.box: part.leaf.value for part in self.shards()}
        made = _dtensor().pack([tf.constant(arrays[box]) for box in _boxes(self._layout, self.shape)], self._layout)
        if not isinstance(self.value, tf.Variable):
            return made
        self.value.assign(made)
        return self.value


def _boxes(layout: Any, shape: Any) -> list[Box]:
    """Return the box of each device of this process."""
    counts = [layout.num_shards(axis) for axis in range(len(shape))]
    size = tuple(length // count for length, count in zip(shape, counts, strict=True))
    indices = layout.offset_to_shard()[: layout.mesh.num_local_devices()]
    return [Box(tuple(i * n for i, n in zip(index, size, strict=True)), size) for index in indices]


def _dtensor() -> ModuleType:
    return importlib.import_module("tensorflow.experimental.dtensor")
