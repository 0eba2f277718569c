"""jax arrays: immutable, so that on the host they are referenced by a save and made anew by a load."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ckpt.dtypes import dtype_name, numpy_dtype
from ckpt.leaves.base import ArrayLeaf
from ckpt.leaves.host import HostLeaf, NumpyLeaf, flat_bytes


def as_leaf(value: jax.Array) -> ArrayLeaf:
    """Return the leaf of a jax array."""
    return JaxLeaf(value)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """A new array on the default device; attributes: key (the random generator of a key array)."""
    return _JaxTarget(dtype, shape, None, attributes.get("key"))


class JaxLeaf(HostLeaf):
    """A jax array to be saved. The bytes of a key array are its key data."""

    kind = "jax"

    __slots__ = ("_data", "_key")

    def __init__(self, value: jax.Array) -> None:
        if isinstance(value, jax.core.Tracer):
            raise TypeError("a traced jax value has no data: save outside of jit")
        if not value.is_fully_addressable:
            raise TypeError("the array is sharded over processes")
        self.value = value
        self._key = None
        self._data = value
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            self._key = str(jax.random.key_impl(value))
            self._data = jax.random.key_data(value)
        array = np.asarray(self._data)
        self.dtype = dtype_name(array.dtype)
        self.shape = array.shape
        self.itemsize = array.dtype.itemsize
        self.nbytes = array.nbytes
        self.array = NumpyLeaf(array).array
        self.flat = flat_bytes(self.array)

    def identity(self) -> tuple[Any, ...]:
        return ("jax", id(self.value))

    def attributes(self) -> dict[str, Any]:
        return {"key": self._key} if self._key else {}

    def frozen(self) -> bool:
        # The host array keeps the buffer alive, also when jit donates it; a device array would be deleted instead,
        # but np.asarray has already copied that one.
        return True

    def target(self) -> ArrayLeaf:
        return _JaxTarget(self.dtype, self.shape, self.value.sharding, self._key)


class _JaxTarget(NumpyLeaf):
    """Bytes on the host that become a jax array once they are all there."""

    kind = "jax"

    __slots__ = ("_key", "_sharding")

    def __init__(self, dtype: str, shape: tuple[int, ...], sharding: Any, key: str | None) -> None:
        super().__init__(np.empty(shape, numpy_dtype(dtype)))
        self._sharding = sharding
        self._key = key

    def finish(self) -> Any:
        if self._key:
            made = jax.random.wrap_key_data(jax.numpy.asarray(self.value), impl=self._key)
            return jax.device_put(made, self._sharding)
        made = jax.device_put(self.value, self._sharding)
        if made.dtype != self.value.dtype:
            raise TypeError(f"jax made {made.dtype} of {self.dtype}: set jax_enable_x64 to load it")
        return made
