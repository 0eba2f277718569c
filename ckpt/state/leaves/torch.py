"""Leaves of torch tensors: viewed by numpy on the host, copied on a separate stream from CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ckpt.state.boxes import Box, contiguous_start
from ckpt.state.leaves.base import LAUNCH_BYTES, ArrayLeaf, Bytes, LeafPiece, MemoryLayout, StridedElements, Transfer
from ckpt.state.leaves.numpy import HostLeaf, flat_bytes
from ckpt.state.leaves.torch_streams import on_side_stream, started_kernels

# Types that numpy has too; tensors of other types are viewed as integers of the same size.
_NUMPY_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
}  # fmt: skip
_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_UPLOAD_ALIGNMENT = 16
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_array(kind: type) -> bool:
    """Return whether values of this type are tensors."""
    return issubclass(kind, torch.Tensor)


def as_leaf(value: torch.Tensor) -> ArrayLeaf:
    """Return the leaf of a tensor; raise TypeError for one that is not plain memory."""
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        if torch.nn.parameter.is_lazy(value):
            raise TypeError("a parameter of a lazy module has no shape yet: run the module once before it is saved or loaded")
        if is_sharded(value):
            return sharded_leaf(value)
    if value.is_nested:
        raise TypeError("a nested tensor consists of several tensors: store what its unbind() returns")
    if value.layout is not torch.strided:
        raise TypeError(f"a {value.layout} tensor has no single block of memory: store its indices and values")
    if value.is_cpu:
        return TorchLeaf(value)
    if value.is_meta:
        raise TypeError("a tensor on the meta device has no data: give it memory first, as module.to_empty(device=…) does")
    return TorchDeviceLeaf(value)


def torch_attributes(value: torch.Tensor) -> dict[str, bool]:
    """Return the attributes that mark a parameter (`parameter`) and a tensor with a gradient (`requires_grad`)."""
    found = {}
    if isinstance(value, torch.nn.Parameter):
        found["parameter"] = True
    if value.requires_grad and value.is_leaf:
        found["requires_grad"] = True
    return found


def is_sharded(value: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor or a ShardedTensor."""
    return hasattr(value, "device_mesh") or hasattr(value, "local_shards")


def sharded_leaf(value: torch.Tensor) -> ArrayLeaf:
    """Return the leaf of a DTensor or a ShardedTensor."""
    from ckpt.state.leaves import dtensor

    return dtensor.as_leaf(value)


def empty_leaf(dtype: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> ArrayLeaf:
    """Return the leaf of a new, uninitialised tensor on the host; attributes: parameter, requires_grad."""
    value = torch.empty(shape, dtype=_require_dtype(dtype))
    if attributes.get("parameter"):
        value = torch.nn.Parameter(value, requires_grad=bool(attributes.get("requires_grad")))
    elif attributes.get("requires_grad"):
        value.requires_grad_(True)
    return TorchLeaf(value)


def dtype_of_name(name: str) -> torch.dtype | None:
    """Return the dtype of torch with this name; None if torch has none.

    The name may come from a file, so `getattr` must not look it up: torch imports some of its modules when they are asked for.
    """
    found = vars(torch).get(name)
    return found if isinstance(found, torch.dtype) else None


def _require_dtype(name: str) -> torch.dtype:
    dtype = dtype_of_name(name)
    if dtype is None:
        raise TypeError(
            f"the installed torch {torch.__version__} has no dtype {name}: update torch, or give `like` with numpy arrays"
        )
    return dtype


class _TensorType(NamedTuple):
    name: str
    itemsize: int
    view_dtype: torch.dtype | None
    """The dtype under which numpy views the tensor, None where numpy has the type itself."""


@lru_cache(maxsize=64)
def _tensor_type(dtype: torch.dtype) -> _TensorType:
    if dtype in _QUANTIZED:
        raise TypeError(f"a quantized tensor ({dtype}) carries scales: store .int_repr() and the scales")
    shown = None if dtype in _NUMPY_DTYPES else _INTEGER_DTYPES[dtype.itemsize]
    return _TensorType(str(dtype).removeprefix("torch."), dtype.itemsize, shown)


def _require_storage(value: torch.Tensor) -> None:
    """Raise TypeError for a tensor whose elements have no memory: reading them would return unrelated bytes."""
    if torch._is_functional_tensor(value):
        raise TypeError("a tensor inside torch.func.functionalize has no memory of its own: save outside of the transform")
    if value.data_ptr():
        end = value.storage_offset() + 1 + sum([(n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)])
        if end * value.dtype.itemsize <= value.untyped_storage().nbytes():
            return
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        raise RuntimeError("its elements have no memory")
    raise TypeError(
        "its storage is smaller than the tensor, as after untyped_storage().resize_(0): restore the storage before the save "
        "(FSDP: gather or reshard its parameters), or leave it out"
    )


def _lazy_view_of(value: torch.Tensor) -> str:
    """Return `MemoryLayout.view` of a tensor."""
    return " ".join(["conj"] * value.is_conj() + ["neg"] * value.is_neg())


def _resolve_lazy_view(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a lazy view with the elements that the user sees."""
    return value.resolve_conj().resolve_neg()


class _TensorLeaf(ArrayLeaf):
    kind = "torch"

    __slots__ = ()

    _start: int
    """Address of the first element."""
    _lazy_view: str
    """`MemoryLayout.view`: what a lazy view still has to apply to its bytes."""

    def _describe(self, value: torch.Tensor) -> tuple[torch.dtype | None, int]:
        """Set the common attributes; return the dtype under which numpy views the tensor (None for its own), and `_start`."""
        self.value = value
        self.dtype, self.itemsize, shown = _tensor_type(value.dtype)
        self.nbytes = value.nbytes
        start = value.data_ptr()
        if self.nbytes and (not start or value.untyped_storage().nbytes() != self.nbytes):
            _require_storage(value)
        return shown, start

    def memory_layout(self) -> MemoryLayout | None:
        value, size = self.value, self.itemsize
        strides = tuple([step * size for step in value.stride()])
        return MemoryLayout(str(value.device), self._start, self.shape, strides, size, self.dtype, self._lazy_view)

    def attributes(self) -> Mapping[str, str | bool]:
        value = self.value
        return {} if type(value) is torch.Tensor and not value.requires_grad else torch_attributes(value)

    def version(self) -> int | None:
        return None if self.value.is_inference() else self.value._version

    def target(self) -> ArrayLeaf:
        return _LazyTarget(self.value, self) if self._lazy_view else self


class _LazyTarget(_TensorLeaf):
    """The target of a conjugate or negative view: torch writes through the view, so that it then has the given elements."""

    __slots__ = ("_lazy_view", "_ready", "_start")

    def __init__(self, value: torch.Tensor, like: _TensorLeaf) -> None:
        self.value = value
        self.dtype, self.shape, self.itemsize, self.nbytes = like.dtype, like.shape, like.itemsize, like.nbytes
        self.flat = None
        self._lazy_view, self._start = like._lazy_view, like._start
        self._ready = started_kernels(value)

    def read(self, box: Box, out: Bytes) -> None:
        raise AssertionError("a target is not read")

    def write(self, box: Box, data: Bytes) -> None:
        source = torch.from_numpy(data).view(self.value.dtype).view(box.shape)
        if self._ready is not None:
            self._ready.precede_current_stream()  # kernels may still use the old elements
        with torch.no_grad():
            self.value[box.slices()].copy_(source)


class TorchLeaf(_TensorLeaf, HostLeaf):
    """A tensor on the host."""

    __slots__ = ("_lazy_view", "_start")

    def __init__(self, value: torch.Tensor) -> None:
        shown, self._start = self._describe(value)
        plain = value.detach() if value.requires_grad else value
        self._lazy_view = ""
        try:
            self.array = (plain if shown is None else plain.view(shown)).numpy()
        except RuntimeError:  # `view` and `numpy` refuse a lazy view; testing each tensor first would double the time here
            self._lazy_view = _lazy_view_of(plain)
            if not self._lazy_view:
                raise
            plain = _resolve_lazy_view(plain)
            self.array = (plain if shown is None else plain.view(shown)).numpy()
        self.shape = self.array.shape
        self.flat = flat_bytes(self.array)

    def address(self) -> int | None:
        return None if self.flat is None or self._lazy_view else self._start  # for a lazy view, `array` is a copy


class TorchDeviceLeaf(_TensorLeaf):
    """A tensor on an accelerator. Copies on CUDA wait for the kernels that compute it; no call synchronises the device."""

    __slots__ = ("_lazy_view", "_plain", "_ready", "_start")

    def __init__(self, value: torch.Tensor) -> None:
        self.shape = tuple(value.shape)
        shown, self._start = self._describe(value)
        plain = value.detach()  # the tensor is read later, when it may require a gradient
        if lazy := _lazy_view_of(plain):
            plain = _resolve_lazy_view(plain)
        self._lazy_view = lazy
        self._plain = plain if shown is None else plain.view(shown)
        self.flat = None
        self._ready = started_kernels(value)

    def read(self, box: Box, out: Bytes) -> None:
        for transfer in self.start_reads([LeafPiece(self, box, out)]):
            transfer.synchronize()

    @classmethod
    def start_reads(cls, pieces: Sequence[LeafPiece]) -> list[Transfer]:
        transfers: list[Transfer] = []
        for device, those in _by_device(pieces).items():
            with on_side_stream(device, (leaf._ready for leaf, _, _ in those)) as stream:
                for leaf, box, out in those:
                    torch.from_numpy(out).copy_(leaf._box_bytes(box), non_blocking=stream is not None)
            if stream is not None:
                transfers.append(stream)
        return transfers

    @classmethod
    def read_elements(cls, leaves: Sequence[tuple[Self, StridedElements]]) -> list[bytes]:
        """Return the selected elements, with one transfer for each device and type.

        One transfer for each leaf would take longer than copying the whole state.
        """
        found = [b""] * len(leaves)
        indices_by_type: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (leaf, _) in enumerate(leaves):
            indices_by_type.setdefault((leaf._plain.device, leaf._plain.dtype), []).append(i)
        for (device, _), those in indices_by_type.items():
            with on_side_stream(device, (leaves[i][0]._ready for i in those)):
                data = torch.cat([_strided_elements(leaves[i][0]._plain, leaves[i][1]) for i in those]).cpu()
            at = 0
            raw = data.numpy().view(np.uint8)
            for i in those:
                nbytes = leaves[i][1].runs * leaves[i][1].run_type.itemsize
                found[i] = raw[at : at + nbytes].tobytes()
                at += nbytes
        return found

    def write(self, box: Box, data: Bytes) -> None:
        self.write_pieces([LeafPiece(self, box, data)])

    @classmethod
    def write_pieces(cls, pieces: Sequence[LeafPiece]) -> None:
        with torch.no_grad():
            for device, those in _by_device(pieces).items():
                for kernels in {leaf._ready for leaf, _, _ in those if leaf._ready is not None}:
                    kernels.precede_current_stream()  # they may still use the old elements
                small = [piece for piece in those if piece.data.nbytes < LAUNCH_BYTES]
                if device.type == "cuda" and len(small) > 1 and _upload_together(device, small):
                    those = [piece for piece in those if piece.data.nbytes >= LAUNCH_BYTES]
                for leaf, box, data in those:
                    leaf._elements(box).copy_(_typed(torch.from_numpy(data), leaf, box))  # waits until `data` is read

    def cuda_device(self) -> torch.device | None:
        return None if self._ready is None else self._plain.device

    def _elements(self, box: Box) -> torch.Tensor:
        return self._plain if box.shape == self.shape else self._plain[box.slices()]

    def _box_bytes(self, box: Box) -> torch.Tensor:
        if self._plain.is_contiguous() and (start := contiguous_start(box, self.shape)) is not None:
            part = self._plain.view(-1)[start : start + box.size]
        else:
            part = self._plain[box.slices()].contiguous().view(-1)
        return part.view(torch.uint8)


def _by_device(pieces: Iterable[LeafPiece]) -> dict[torch.device, list[Any]]:
    found: dict[torch.device, list[Any]] = {}
    for piece in pieces:
        leaf: Any = piece.leaf
        found.setdefault(leaf._plain.device, []).append(piece)
    return found


def _typed(raw: torch.Tensor, leaf: TorchDeviceLeaf, box: Box) -> torch.Tensor:
    """Return bytes as the elements of a box of a leaf."""
    return raw.view(leaf._plain.dtype).view(box.shape)


def _upload_together(device: torch.device, pieces: list[Any]) -> bool:
    """Set small pieces on a CUDA device by one transfer; return False if the device has no memory for it."""
    starts = [0, *accumulate(-(-piece.data.nbytes // _UPLOAD_ALIGNMENT) * _UPLOAD_ALIGNMENT for piece in pieces)]
    joined = np.empty(starts[-1], np.uint8)
    for start, (_, _, data) in zip(starts, pieces, strict=False):
        joined[start : start + data.nbytes] = data
    try:
        raw = torch.from_numpy(joined).to(device)
    except torch.OutOfMemoryError:
        return False
    for start, (leaf, box, data) in zip(starts, pieces, strict=False):
        leaf._elements(box).copy_(_typed(raw[start : start + data.nbytes], leaf, box))
    torch.cuda.current_stream(device).synchronize()
    return True


def _strided_elements(plain: torch.Tensor, elements: StridedElements) -> torch.Tensor:
    """Return the selected elements of a tensor, one after the other."""
    runs, run, stride, _, _ = elements
    if plain.is_contiguous():
        return plain.as_strided((runs, run), (stride, 1)).reshape(-1)
    return plain.take(torch.from_numpy(elements.indices()).to(plain.device))
