"""torch tensors: on the host seen through numpy, on CUDA copied on a stream of their own."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ckpt.leaves.base import ArrayLeaf, Bytes, Memory
from ckpt.leaves.host import HostLeaf, flat_bytes
from ckpt.shard import Box, contiguous_start

# numpy knows these itself; every other type is shown to it as plain integers of the same size.
_NUMPY = {
    torch.float64, torch.float32, torch.float16, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
}  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def as_leaf(value: torch.Tensor) -> ArrayLeaf:
    """Return the leaf of a tensor; raise TypeError for one that is not plain memory."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        if torch.nn.parameter.is_lazy(value):
            raise TypeError("a parameter of a lazy module has no shape yet: run the module once before it is saved or loaded")
        if is_sharded(value):
            return sharded_leaf(value)
    if value.is_nested:
        raise TypeError("a nested tensor is several: store what its unbind() gives")
    if value.layout is not torch.strided:
        raise TypeError(f"a {value.layout} tensor has no single block of memory: store its indices and values")
    if value.dtype in _QUANTIZED:
        raise TypeError(f"a quantized tensor ({value.dtype}) carries scales: store .int_repr() and the scales")
    if value.is_meta:
        raise TypeError("a tensor on the meta device has no data")
    return TorchLeaf(value) if value.is_cpu else DeviceLeaf(value)


def attributes_of(value: torch.Tensor) -> dict[str, Any]:
    """What makes a tensor a parameter, or one that wants a gradient."""
    found = {}
    if isinstance(value, torch.nn.Parameter):
        found["parameter"] = True
    if value.requires_grad and value.is_leaf:
        found["requires_grad"] = True
    return found


def is_sharded(value: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor or a ShardedTensor."""
    return hasattr(value, "device_mesh") or hasattr(value, "local_shards")


def sharded_leaf(value: torch.Tensor) -> ArrayLeaf:
    """The leaf of a tensor that is spread over ranks."""
    from ckpt.leaves import dtensor

    return dtensor.as_leaf(value)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """A new tensor on the host; attributes: parameter, requires_grad."""
    value = torch.empty(shape, dtype=_torch_dtype(dtype))
    if attributes.get("parameter"):
        value = torch.nn.Parameter(value, requires_grad=bool(attributes.get("requires_grad")))
    elif attributes.get("requires_grad"):
        value.requires_grad_(True)
    return TorchLeaf(value)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch ({torch.__version__}) has no type {name}")
    return dtype


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Tensor(ArrayLeaf):
    kind = "torch"

    __slots__ = ()

    def _describe(self, value: torch.Tensor) -> torch.Tensor:
        dtype = value.dtype
        self.value = value
        self.dtype = _name(dtype)
        self.shape = tuple(value.shape)
        self.itemsize = dtype.itemsize
        self.nbytes = value.nbytes
        plain = value.detach() if value.requires_grad else value
        if plain.is_neg() or (dtype.is_complex and plain.is_conj()):
            plain = plain.resolve_conj().resolve_neg()
        return plain if dtype in _NUMPY else plain.view(_INTEGERS[self.itemsize])

    def identity(self) -> tuple[Any, ...]:
        value = self.value
        return (value.device, value.data_ptr(), self.dtype, self.shape, value.stride())

    def attributes(self) -> dict[str, Any]:
        value = self.value
        return {} if type(value) is torch.Tensor and not value.requires_grad else attributes_of(value)

    def version(self) -> int | None:
        return None if self.value.is_inference() else self.value._version

    def target(self) -> ArrayLeaf:
        if self.value.is_conj() or self.value.is_neg():
            raise TypeError("a conjugated or negated view cannot be written to: resolve it first")
        return self


class TorchLeaf(_Tensor, HostLeaf):
    """A tensor on the host."""

    __slots__ = ()

    def __init__(self, value: torch.Tensor) -> None:
        self.array = self._describe(value).numpy()
        self.flat = flat_bytes(self.array)


class DeviceLeaf(_Tensor):
    """A tensor on an accelerator. What made it is waited for by an event, never by stopping the device."""

    __slots__ = ("_plain", "_ready")

    def __init__(self, value: torch.Tensor) -> None:
        self._plain = self._describe(value).detach()  # it is read later, when it may want a gradient
        self.flat = None
        self._ready = None
        if value.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(value.device))

    def read(self, box: Box, out: Bytes) -> None:
        host = torch.from_numpy(out)
        if self._ready is None:
            host.copy_(self._bytes(box))
            return
        stream = _side_stream(self._plain.device)
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            host.copy_(self._bytes(box), non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()

    def write(self, box: Box, data: Bytes) -> None:
        source = torch.from_numpy(data).view(self._plain.dtype).view(box.shape)
        with torch.no_grad():
            self._plain[box.slices()].copy_(source)

    def memory(self) -> Memory | None:
        plain = self._plain
        strides = tuple(step * self.itemsize for step in plain.stride())
        return Memory(str(plain.device), plain.data_ptr(), self.shape, strides, self.itemsize)

    def on_cuda(self) -> bool:
        return self._ready is not None

    def _bytes(self, box: Box) -> torch.Tensor:
        if self._plain.is_contiguous() and (start := contiguous_start(box, self.shape)) is not None:
            part = self._plain.view(-1)[start : start + box.size]
        else:
            part = self._plain[box.slices()].contiguous().view(-1)
        return part.view(torch.uint8)


_local = threading.local()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for each thread and device, so that copies run beside the training step's kernels."""
    streams = _local.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    stream: torch.cuda.Stream = streams[device]
    return stream


def pin(memory: np.ndarray[Any, Any]) -> bool:
    """Page-lock host memory so that copies from CUDA are asynchronous; whether that worked."""
    status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    return int(status) == 0


def unpin(memory: np.ndarray[Any, Any]) -> None:
    """Undo `pin`, before the memory is given back."""
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
