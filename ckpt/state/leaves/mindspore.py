"""Leaves of MindSpore tensors and parameters: their memory on the host as a numpy array, copies of other memory.

A load writes to the memory itself. `Parameter.set_data()` would give the parameter another memory, and a compiled step may
still use the memory that it had. MindSpore compiles the steps of its optimizers in PyNative mode, too.

The objects of MindSpore that have a state (cells, optimizers, schedules, scalers, generators, iterators) are in
`mindspore_objects`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.common.sparse_tensor import RowTensorInner

from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.leaves.mindspore_objects import (
    as_stateful,
    is_random_generator,
    module_entries,
    random_state,
    set_random_state,
)
from ckpt.state.leaves.numpy import HostLeaf, NumpyLeaf, flat_bytes
from ckpt.storage.base.forks import fork_safe_lock

__all__ = [
    "as_leaf", "as_stateful", "empty_leaf", "is_array", "is_random_generator", "module_entries", "random_state",
    "set_random_state",
]  # fmt: skip

_COMPOSITES = {
    ms.COOTensor: "a COOTensor consists of several tensors: store its indices, values and shape",
    ms.CSRTensor: "a CSRTensor consists of several tensors: store its indptr, indices, values and shape",
    RowTensorInner: "a RowTensor consists of several tensors: store its indices, values and dense_shape",
}
_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex64", "complex128",
)  # fmt: skip
_NAME_OF_TYPE = {getattr(ms, "bool_" if name == "bool" else name): name for name in _NAMES}
_TYPE_OF_NAME = {name: dtype for dtype, name in _NAME_OF_TYPE.items()}


def is_array(kind: type) -> bool:
    """Return whether values of this type are tensors or parameters, or consist of tensors."""
    return issubclass(kind, (ms.Tensor, *_COMPOSITES))


def is_framework_class(kind: type) -> bool:
    """Return whether a type is the class that MindSpore makes of Parameter and Tensor, which names the module `abc`."""
    return kind is ms.Parameter._base_type.get("Parameter")


def as_leaf(value: Any) -> ArrayLeaf:
    """Return the leaf of a tensor or parameter; raise TypeError for one without plain bytes."""
    for kind, message in _COMPOSITES.items():
        if isinstance(value, kind):
            raise TypeError(message)
    if str(value.dtype) == "String":
        raise TypeError("a tensor of strings has no plain bytes: store it as a list of str, or encode it as numbers")
    if value.dtype not in _NAME_OF_TYPE:
        raise TypeError(
            f"MindSpore gives no access to the bytes of a {value.dtype} tensor: store it as bfloat16 or as integers"
        )
    if value.has_init:
        raise TypeError("the tensor has no data yet: call its init_data(), or init_parameters_data() of the cell")
    in_place = _is_on_host() and (value.is_contiguous() or views_have_addresses())
    return HostTensorLeaf(value) if in_place else CopiedTensorLeaf(value)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return the target of a new tensor; attributes: parameter (the name of a new parameter), requires_grad."""
    if dtype not in _TYPE_OF_NAME:
        raise TypeError(f"MindSpore {ms.__version__} has no dtype {dtype}: give `like` with numpy arrays")
    return _NewTensor(dtype, shape, attributes)


def _is_on_host() -> bool:
    return str(ms.get_context("device_target")) == "CPU"


def _host_array(value: Any) -> np.ndarray[Any, Any]:
    """Return the elements of a tensor, bfloat16 as integers. The array is its memory or, as of views, a copy."""
    array: np.ndarray[Any, Any] = value.asnumpy()  # waits for the operations that compute it
    return array.view(np.uint16) if value.dtype == ms.bfloat16 else array


class _ViewedMemory:
    """The memory of a tensor on the host for `np.asarray`, which keeps this object and so the tensor."""

    def __init__(self, value: Any, array: np.ndarray[Any, Any]) -> None:
        self._value = value
        strides = tuple(step * array.itemsize for step in value.stride())
        self.__array_interface__ = {
            "version": 3, "shape": array.shape, "typestr": array.dtype.str, "strides": strides,
            "data": (value.data_ptr(), False),
        }  # fmt: skip


_lock = fork_safe_lock()
"""Guards the first call of `_probe_views`: MindSpore may fail if two threads run the first operation of a process."""


def views_have_addresses() -> bool:
    """Return whether a view knows the address of its elements in the memory of the host, as in MindSpore 2.10.

    MindSpore 2.7 returns the address of another memory, in which its kernels compute.
    """
    with _lock:
        return _probe_views()


@lru_cache(maxsize=1)
def _probe_views() -> bool:
    base = ms.Tensor(np.zeros(4, np.float32))
    return bool(base[2:].data_ptr() == base.asnumpy().__array_interface__["data"][0] + 8)


def _memory_of(value: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor on the host, also of a view of another tensor, with its strides."""
    array = _host_array(value)
    if not array.nbytes or not views_have_addresses() or array.__array_interface__["data"][0] == value.data_ptr():
        return array
    return np.asarray(_ViewedMemory(value, array))


def _attributes(value: object) -> dict[str, str | bool]:
    if not isinstance(value, ms.Parameter):
        return {}
    return {"parameter": value.name, "requires_grad": bool(value.requires_grad)}


class HostTensorLeaf(HostLeaf):
    """A tensor in the memory of the host."""

    kind = "mindspore"

    __slots__ = ()

    # `version` stays None, since optimizers change parameters without raising `_version`.

    def __init__(self, value: Any) -> None:
        self.value = value
        self.array = _memory_of(value)
        self.dtype = _NAME_OF_TYPE[value.dtype]
        self.shape = self.array.shape
        self.itemsize = self.array.itemsize
        self.nbytes = self.array.nbytes
        self.flat = flat_bytes(self.array)

    def target(self) -> ArrayLeaf:
        # MindSpore 2.7 gives a copy of a view, and of a result of a kernel.
        is_copy = not isinstance(self.value, ms.Parameter) and not views_have_addresses()
        return _CheckedTarget(self.value, self.dtype, self.shape) if is_copy else self

    def attributes(self) -> Mapping[str, str | bool]:
        return _attributes(self.value)


class CopiedTensorLeaf(NumpyLeaf):
    """A tensor on an accelerator, with the elements that it has now."""

    kind = "mindspore"
    can_alias = False

    __slots__ = ()

    def __init__(self, value: Any) -> None:
        super().__init__(_host_array(value))
        self.value = value
        self.dtype = _NAME_OF_TYPE[value.dtype]

    def identity(self) -> tuple[str, int]:
        return ("mindspore", id(self.value))

    def attributes(self) -> Mapping[str, str | bool]:
        return _attributes(self.value)

    def is_immutable(self) -> bool:
        return True  # the numpy array is a copy, which no later step changes

    def target(self) -> ArrayLeaf:
        return _CopyTarget(self.value, self.dtype, self.shape)


class _CopyTarget(NumpyLeaf):
    """Bytes on the host that `finish` copies to the memory of a tensor after a load has filled them."""

    kind = "mindspore"

    __slots__ = ("_target",)

    def __init__(self, target: Any, dtype: str, shape: tuple[int, ...]) -> None:
        super().__init__(np.empty(shape, numpy_dtype(dtype)))
        self._target = target

    def finish(self) -> Any:
        made = _new_tensor(self.value, self.dtype)
        if self._target.is_contiguous():
            self._target.copy_(made)
        elif made.size:
            self._target[...] = made
        return self._target


class _CheckedTarget(_CopyTarget):
    """Bytes on the host for a tensor of MindSpore 2.7, whose `asnumpy` may be a copy; then `finish` assigns the elements."""

    __slots__ = ()

    def finish(self) -> Any:
        bits = self.value.view(np.uint16) if self.dtype == "bfloat16" else self.value
        np.copyto(_host_array(self._target), bits)
        if self.nbytes and _host_array(self._target.copy()).tobytes() != bits.tobytes():
            try:
                self._target[...] = _new_tensor(self.value, self.dtype)
            except RuntimeError as error:  # MindSpore has no such kernel for bfloat16 on the host
                raise TypeError(
                    f"MindSpore {ms.__version__} can't set a view of {self.dtype}: store the whole tensor"
                ) from error
        return self._target


class _NewTensor(NumpyLeaf):
    """Bytes on the host from which `finish` makes a tensor or a parameter after a load has filled them."""

    kind = "mindspore"

    __slots__ = ("_attributes",)

    def __init__(self, dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
        super().__init__(np.empty(shape, numpy_dtype(dtype)))
        self._attributes = attributes

    def attributes(self) -> Mapping[str, str | bool]:
        return {}

    def finish(self) -> Any:
        tensor = _new_tensor(self.value, self.dtype)
        if "parameter" not in self._attributes:
            return tensor
        return ms.Parameter(tensor, self._attributes["parameter"], bool(self._attributes.get("requires_grad")))


def _new_tensor(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return a tensor with the elements of an array, which is of the type of that name in numpy or ml_dtypes."""
    if dtype != "bfloat16":
        return ms.Tensor(array)
    made = ms.Tensor(np.zeros(array.shape, np.float32), ms.bfloat16)  # MindSpore converts from its own bfloat16 type alone
    if array.size:
        made.asnumpy().view(np.uint16)[...] = array.view(np.uint16)
    return made
