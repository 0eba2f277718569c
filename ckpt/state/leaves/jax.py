"""Leaves of jax arrays. They are immutable: a save references host arrays, and a load makes new ones.

An array over several devices is stored by its shards: each process has those on its own devices, and nothing is gathered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from ckpt.state.boxes import Box, Replica
from ckpt.state.dtype_names import dtype_name, numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf, Bytes, LeafShard
from ckpt.state.leaves.jax_objects import advice, as_pytree, as_stateful, keeps_functions, static_fields
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.state.leaves.sharded import ShardedLeaf

__all__ = ["advice", "as_leaf", "as_pytree", "as_stateful", "empty_leaf", "is_array", "keeps_functions", "static_fields"]


def is_array(kind: type) -> bool:
    """Return whether values of this type are arrays, or stand for one: inside of jit, or in `like`."""
    return issubclass(kind, (jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct))


def as_leaf(value: jax.Array) -> ArrayLeaf:
    """Return the leaf of a jax array; raise TypeError for one without data."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError("a traced jax value has no data: save outside of jit")
    if isinstance(value, jax.ShapeDtypeStruct):
        return AbstractLeaf(value)
    if len(value.sharding.device_set) > 1 and not (value.is_fully_addressable and value.is_fully_replicated):
        return JaxShards(value)
    return JaxLeaf(value)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return the target of a new array on the default device; attributes: those of a `JaxLeaf`."""
    return _JaxTarget(dtype, shape, None, attributes.get("key"), bool(attributes.get("weak")))


class JaxLeaf(NumpyLeaf):
    """A jax array that a save reads. The bytes of a key array are its key data."""

    kind = "jax"
    can_alias = False

    __slots__ = ("_data", "_key")

    def __init__(self, value: jax.Array) -> None:
        self._data, self._key = _plain_data(value)
        super().__init__(np.asarray(self._data))
        self.value = value

    def identity(self) -> tuple[str, int]:
        return ("jax", id(self.value))

    def attributes(self) -> Mapping[str, str | bool]:
        return _attributes(self._data, self._key)

    def is_immutable(self) -> bool:
        # The numpy array keeps a host buffer alive even if jit donates it. Donation would delete a device buffer, but
        # np.asarray has already copied that one.
        return True

    def target(self) -> ArrayLeaf:
        # An array without a committed device may be combined with arrays over a mesh, so the loaded array must not be committed
        # either.
        sharding = self.value.sharding if getattr(self.value, "_committed", True) else None
        return _JaxTarget(self.dtype, self.shape, sharding, self._key, self._data.weak_type)


class _JaxTarget(NumpyLeaf):
    """Bytes on the host from which `finish` makes a jax array after a load has filled them."""

    kind = "jax"

    __slots__ = ("_key", "_sharding", "_weak")

    def __init__(self, dtype: str, shape: tuple[int, ...], sharding: Any, key: str | None, weak: bool = False) -> None:
        super().__init__(np.empty(shape, numpy_dtype(dtype)))
        self._sharding = sharding
        self._key = key
        self._weak = weak

    def attributes(self) -> Mapping[str, str | bool]:
        return {"key": self._key} if self._key else {}

    def finish(self) -> Any:
        if self._key:
            made = jax.random.wrap_key_data(jax.numpy.asarray(self.value), impl=self._key)
            return jax.device_put(made, self._sharding)
        made = _require_same_dtype(jax.device_put(self.value, self._sharding), self)
        return _weakly_typed(made) if self._weak else made


class JaxShards(ShardedLeaf):
    """A jax array over several devices, as the shards of this process."""

    __slots__ = ("_data", "_key")

    def __init__(self, value: jax.Array) -> None:
        self._data, self._key = _plain_data(value)
        shape = self._data.shape
        processes_by_box = _processes_by_box(self._data.sharding, shape)
        mine = jax.process_index()
        parts: dict[Box, LeafShard] = {}
        for shard in self._data.addressable_shards:
            box = _box_of_index(shard.index, shape)
            if box not in parts:
                owners = processes_by_box[box]
                parts[box] = LeafShard(
                    _HostShard(np.asarray(shard.data)), box, Replica(owners.index(mine), len(owners), owners)
                )
        attributes = _attributes(self._data, self._key)
        dtype = np.dtype(self._data.dtype)
        super().__init__(value, "jax", shape, dtype_name(dtype), dtype.itemsize, list(parts.values()), attributes)

    def identity(self) -> tuple[str, int]:
        return ("jax", id(self.value))

    def target(self) -> ArrayLeaf:
        return _JaxShardsTarget(self, self._data.sharding, self._key, self._data.weak_type)


class AbstractLeaf(ArrayLeaf):
    """A jax.ShapeDtypeStruct in `like`, in whose place a load puts an array with its sharding."""

    kind = "jax"

    __slots__ = ("_data", "_key")

    def __init__(self, value: jax.ShapeDtypeStruct) -> None:
        self.value = value
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        self._key = value.dtype._impl.name if is_key else None
        self._data = jax.eval_shape(jax.random.key_data, value) if is_key else value
        dtype = np.dtype(self._data.dtype)
        self.dtype, self.itemsize = dtype_name(dtype), dtype.itemsize
        self.shape = tuple(self._data.shape)
        self.nbytes = math.prod(self.shape) * self.itemsize
        self.flat = None

    def attributes(self) -> Mapping[str, str | bool]:
        return {"key": self._key} if self._key else {}

    def require_data(self) -> None:
        raise TypeError("a jax.ShapeDtypeStruct has a shape but no data: store the array")

    def read(self, box: Box, out: Bytes) -> None:
        self.require_data()

    def write(self, box: Box, data: Bytes) -> None:
        self.require_data()

    def target(self) -> ArrayLeaf:
        sharding, weak = self.value.sharding, getattr(self.value, "weak_type", False)
        if sharding is None or (sharding.is_fully_replicated and sharding.is_fully_addressable):
            return _JaxTarget(self.dtype, self.shape, sharding, self._key, weak)
        if self._key:
            raise TypeError(
                "a jax.ShapeDtypeStruct of sharded keys does not say how their data is sharded: give the array of keys"
            )
        indices = sharding.addressable_devices_indices_map(self.shape).values()
        boxes = dict.fromkeys(_box_of_index(index, self.shape) for index in indices)
        parts = [LeafShard(NumpyLeaf(np.empty(0, numpy_dtype(self.dtype))), box) for box in boxes]
        shards = ShardedLeaf(None, "jax", self.shape, self.dtype, self.itemsize, parts)
        return _JaxShardsTarget(shards, sharding, None, weak)


class _HostShard(NumpyLeaf):
    """One shard as a host array. It never changes, and the host array keeps its buffer alive."""

    kind = "jax"
    can_alias = False

    __slots__ = ()

    def is_immutable(self) -> bool:
        return True


class _JaxShardsTarget(ShardedLeaf):
    """Bytes on the host for each shard of this process, from which `finish` makes a jax array after a load has filled them."""

    __slots__ = ("_key", "_sharding", "_weak")

    def __init__(self, like: ShardedLeaf, sharding: Any, key: str | None, weak: bool) -> None:
        dtype = numpy_dtype(like.dtype)
        parts = [LeafShard(NumpyLeaf(np.empty(p.box.shape, dtype)), p.box, p.replica) for p in like.shards()]
        super().__init__(None, "jax", like.shape, like.dtype, like.itemsize, parts)
        self._sharding = sharding
        self._key = key
        self._weak = weak

    def finish(self) -> Any:
        shards = {p.box: p.leaf.value for p in self.shards()}
        devices = self._sharding.addressable_devices_indices_map(self.shape)
        arrays = [jax.device_put(shards[_box_of_index(index, self.shape)], device) for device, index in devices.items()]
        made = jax.make_array_from_single_device_arrays(self.shape, self._sharding, arrays)
        if self._key:
            return jax.random.wrap_key_data(made, impl=self._key)
        return _weakly_typed(_require_same_dtype(made, self)) if self._weak else _require_same_dtype(made, self)


def _plain_data(value: jax.Array) -> tuple[jax.Array, str | None]:
    """Return the array of plain numbers, and the name of the random generator if it is a key array, else None."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value), str(jax.random.key_impl(value))
    return value, None


def _attributes(data: jax.Array, key: str | None) -> dict[str, str | bool]:
    return {"key": key} if key else {"weak": True} if data.weak_type else {}


def _weakly_typed(value: jax.Array) -> jax.Array:
    """Return the array with a weak type: results take the dtype of the other operand. Without it, they would round differently.

    No function that jax documents makes a weakly typed array from an array; a primitive does. Its parameters are not
    documented.
    """
    made = None
    with contextlib.suppress(AttributeError, TypeError):
        made = jax.lax.convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)
    if made is None or not made.weak_type:
        raise TypeError(
            f"ckpt cannot make a weakly typed array with jax {jax.__version__}: give `like` an array of a fixed dtype, as in "
            f"jnp.asarray(x, dtype='{value.dtype}')"
        )
    return made


def _require_same_dtype(made: jax.Array, leaf: ArrayLeaf) -> jax.Array:
    if dtype_name(np.dtype(made.dtype)) != leaf.dtype:
        raise TypeError(f"jax converted {leaf.dtype} to {made.dtype}: set jax_enable_x64 to load it")
    return made


@lru_cache(maxsize=4096)
def _processes_by_box(sharding: Any, shape: tuple[int, ...]) -> dict[Box, tuple[int, ...]]:
    """Return the processes that have each shard."""
    found: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(_box_of_index(index, shape), set()).add(device.process_index)
    return {box: tuple(sorted(processes)) for box, processes in found.items()}


def _box_of_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    spans = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _, _ in spans), tuple(b - a for a, b, _ in spans))
