"""Leaves of Paddle tensors: viewed by numpy on the host, copied in pieces from other devices.

The objects of Paddle that have a state (layers, optimizers, schedules, random generators) are in `paddle_objects`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase, _dygraph_place_guard

from ckpt.errors import FormatError
from ckpt.state.boxes import Box
from ckpt.state.dtype_names import dtype_name, numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf, Bytes, MemoryLayout
from ckpt.state.leaves.numpy import HostLeaf, flat_bytes
from ckpt.state.leaves.paddle_objects import (
    as_stateful,
    is_module,
    is_random_generator,
    module_entries,
    param_groups,
    random_state,
    set_random_state,
)

__all__ = [
    "as_leaf", "as_stateful", "empty_leaf", "is_array", "is_module", "is_random_generator", "module_entries", "param_groups",
    "random_state", "set_random_state",
]  # fmt: skip

_Parameter = EagerParamBase


def is_array(kind: type) -> bool:
    """Return whether values of this type are tensors."""
    return issubclass(kind, paddle.Tensor)


def as_leaf(value: paddle.Tensor) -> ArrayLeaf:
    """Return the leaf of a tensor; raise TypeError for one that is not plain memory."""
    if value.is_dist():
        from ckpt.state.leaves import paddle_dist

        return paddle_dist.as_leaf(value)
    if not value.is_dense():
        raise TypeError("a sparse tensor has no single block of memory: store its indices() and values()")
    if getattr(value, "fw_storage", None) is not None:
        raise TypeError("it is divided over ranks (group_sharded_parallel): give ckpt.adapters.paddle.ModelState the layer")
    if not value._is_initialized() and value.size:
        raise TypeError("the tensor has no memory yet (LazyGuard, or cleared): initialize it before it is saved or loaded")
    return PaddleLeaf(value) if _is_on_host(value) else PaddleDeviceLeaf(value)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return the leaf of a new, uninitialised tensor on the host; attributes: parameter, requires_grad."""
    found = getattr(paddle, dtype, None)
    if not isinstance(found, type(paddle.float32)) or (dtype.startswith("uint") and dtype != "uint8"):  # its uint16 is bfloat16
        raise TypeError(f"paddle {paddle.__version__} has no dtype {dtype}: update paddle, or give `like` with numpy arrays")
    with _dygraph_place_guard(paddle.CPUPlace()):
        value = paddle.empty(list(shape), dtype=dtype)
        trained = bool(attributes.get("requires_grad"))
        if attributes.get("parameter"):
            value = _Parameter.from_tensor(value, trainable=trained)
        value.stop_gradient = not trained
    return PaddleLeaf(value)


_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # most kernels of paddle lack these
_NOT_IN_NUMPY = ("bfloat16", *_FLOAT8)
"""Types that numpy views as integers of the same size."""


class _TensorType(NamedTuple):
    name: str
    itemsize: int
    typestr: str
    """The elements as the array interface of numpy names them: the type itself, or an integer of the same size."""


@lru_cache(maxsize=64)
def _tensor_type(dtype: object) -> _TensorType:
    name = str(dtype).removeprefix("paddle.")
    try:
        plain = numpy_dtype(name)
    except FormatError:
        raise TypeError(f"elements of type {name} have no bytes of their own: store them as numbers or as str") from None
    typestr = f"<u{plain.itemsize}" if name in _NOT_IN_NUMPY else plain.str
    return _TensorType(dtype_name(plain), plain.itemsize, typestr)


def _is_on_host(value: paddle.Tensor) -> bool:
    place = value.place
    return bool(place.is_cpu_place() or place.is_cuda_pinned_place())


class _HostMemory:
    """The memory of a tensor for `np.asarray`, which keeps this object and so the memory.

    Neither DLPack nor `Tensor.numpy()` can do this: the one lacks bfloat16 and float8, the other copies.
    """

    def __init__(self, value: paddle.Tensor, kind: _TensorType, shape: tuple[int, ...]) -> None:
        self._memory = value.detach()  # another tensor object over the same memory
        strides = None if value.is_contiguous() else tuple(step * kind.itemsize for step in value.strides)
        self.__array_interface__ = {
            "version": 3, "shape": shape, "typestr": kind.typestr, "strides": strides, "data": (value.data_ptr(), False)
        }  # fmt: skip


class _TensorLeaf(ArrayLeaf):
    kind = "paddle"

    __slots__ = ()

    # `version` stays None, since the kernels of the optimizers change parameters without raising `inplace_version`.

    def _describe(self, value: paddle.Tensor) -> _TensorType:
        """Set the common attributes; return the type of the elements."""
        self.value = value
        kind = _tensor_type(value.dtype)
        self.dtype, self.itemsize = kind.name, kind.itemsize
        self.shape = tuple(value.shape)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.itemsize
        return kind

    def memory_layout(self) -> MemoryLayout | None:
        value, size = self.value, self.itemsize
        if not self.nbytes:
            return None
        strides = tuple([step * size for step in value.strides])
        device = "cpu" if _is_on_host(value) else str(value.place)  # as the host is named for arrays of other frameworks
        return MemoryLayout(device, value.data_ptr(), self.shape, strides, size, self.dtype)

    def attributes(self) -> Mapping[str, str | bool]:
        return paddle_attributes(self.value)


def paddle_attributes(value: paddle.Tensor) -> dict[str, bool]:
    """Return what else a load needs to make the same object."""
    found = {}
    if isinstance(value, _Parameter):
        found["parameter"] = True
    if not value.stop_gradient and value.is_leaf:
        found["requires_grad"] = True
    return found


def dtype_and_size(value: paddle.Tensor) -> tuple[str, int]:
    """Return the stored name of the type of the elements, and the bytes of one; raise TypeError for one without bytes."""
    kind = _tensor_type(value.dtype)
    return kind.name, kind.itemsize


class PaddleLeaf(_TensorLeaf, HostLeaf):
    """A tensor on the host."""

    __slots__ = ()

    def __init__(self, value: paddle.Tensor) -> None:
        kind = self._describe(value)
        self.array = np.asarray(_HostMemory(value, kind, self.shape)) if self.nbytes else np.empty(self.shape, kind.typestr)
        self.flat = flat_bytes(self.array)


class PaddleDeviceLeaf(_TensorLeaf):
    """A tensor on an accelerator. Each copy waits for the kernels that compute it."""

    __slots__ = ()

    def __init__(self, value: paddle.Tensor) -> None:
        self._describe(value)
        self.flat = None

    def read(self, box: Box, out: Bytes) -> None:
        plain = self._plain()
        part = plain if box.shape == self.shape else plain[box.slices()]
        host = PaddleLeaf(part.contiguous().cpu())
        assert host.flat is not None
        np.copyto(out, host.flat)

    def write(self, box: Box, data: Bytes) -> None:
        source = PaddleDeviceLeaf(empty_leaf(self.dtype, box.shape, {}).value)
        host = PaddleLeaf(source.value)
        assert host.flat is not None
        np.copyto(host.flat, data)
        plain, new = self._plain(), source._plain()
        with paddle.no_grad():
            if box.shape == self.shape and plain.is_contiguous():
                plain.copy_(new, True)
            else:  # neither `copy_` nor `assign` writes a strided view in every release
                plain[box.slices()] = new

    def _plain(self) -> paddle.Tensor:
        """Return the tensor without autograd, of a type that the kernels for copies have."""
        plain = self.value.detach()
        return plain.view("uint8") if self.dtype in _FLOAT8 else plain
