"""The class AttachedOptimizers, whose memory a save copies while the next forward and backward run (deferred blocks)."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ckpt.state.leaves.base import ArrayLeaf
from ckpt.storage.base.errors import CkptError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class AttachedOptimizers:
    """The attached torch optimizers, and the memory of their parameters and moments while a save begins.

    Only the training thread uses it.
    """

    def __init__(self, before_step: Callable[..., None]) -> None:
        """before_step: called before each step of an attached optimizer."""
        self._before_step = before_step
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        """Weak ones, because a training loop may replace its optimizer to free memory."""
        self._hooks: list[RemovableHandle] = []
        self._tensors: list[torch.Tensor] = []
        """The parameters and moments."""
        self._tensor_at: dict[int, torch.Tensor] = {}
        """One of these tensors for each address."""
        self._ranges: dict[int, list[_Range]] | None = None
        """By the address of a storage: its bytes that belong to them, as separate ranges in order; None until needed."""

    def add(self, optimizer: object) -> None:
        """Attach an optimizer, or the one inside of wrappers; raise CkptError if there is no torch optimizer."""
        inner, hook = _register_step_hook(optimizer, self._before_step)
        self._hooks.append(hook)
        self._optimizers.append(weakref.ref(inner))

    def remove(self, optimizer: object) -> None:
        """Defer no copies of an optimizer's memory from now on. Its hook stays."""
        self._optimizers = [other for other in self._optimizers if other() is not optimizer]

    def detach(self) -> None:
        """Remove the hooks of all optimizers."""
        for hook in self._hooks:
            hook.remove()

    def find_memory(self) -> None:
        """Find the memory of all parameters and moments, for one save: that of the next one may differ."""
        found: list[torch.Tensor] = []
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                found += map(_local, group["params"])
            for state in optimizer.state.values():
                found += [local for local in map(_local, state.values()) if hasattr(local, "data_ptr")]
        by_address = {tensor.data_ptr(): tensor for tensor in found}
        if by_address.pop(0, None) is not None:
            found = [tensor for tensor in found if tensor.data_ptr()]  # without those that have no memory
        self._tensors, self._tensor_at, self._ranges = found, by_address, None

    def forget_memory(self) -> None:
        """Keep no tensor alive until the next save: the optimizer may free it."""
        self._tensors, self._tensor_at, self._ranges = [], {}, None

    def has(self, leaf: ArrayLeaf) -> bool:
        """Return whether all bytes of a leaf belong to parameters or moments of the attached optimizers.

        A leaf may be a view of a part of them. A larger buffer, such as one that has the gradients too, does not belong to
        them, because other code changes it.
        """
        if leaf.kind != "torch":
            return False
        value = leaf.value
        first = self._tensor_at.get(value.data_ptr())
        if first is value:
            return True
        if first is None:
            if value.untyped_storage().nbytes() == leaf.nbytes:  # it is not a view
                return False
        elif first.is_contiguous() and value.is_contiguous():
            if leaf.nbytes <= first.nbytes:
                return True
        elif (first.dtype, first.shape, first.stride()) == (value.dtype, value.shape, value.stride()):
            return True
        return self._has_view(value)

    def _has_view(self, value: torch.Tensor) -> bool:
        if self._ranges is None:
            self._ranges = _ranges_by_storage(self._tensors)
        ranges = self._ranges.get(value.untyped_storage().data_ptr(), [])
        begin, end = _range_of(value)
        at = bisect_right(ranges, (begin, sys.maxsize)) - 1
        return at >= 0 and end <= ranges[at][1]


def _register_step_hook(optimizer: object, before_step: Callable[..., None]) -> tuple[torch.optim.Optimizer, RemovableHandle]:
    """Register a hook before each step of the optimizer; return the optimizer inside any wrappers, and the hook."""
    inner: Any = optimizer
    while inner is not None:
        try:
            return inner, inner.register_step_pre_hook(before_step)
        except AttributeError:  # raised also by a wrapper that inherits the method but was not initialised as an optimizer
            inner = getattr(inner, "optimizer", None)
    raise CkptError(
        f"{type(optimizer).__name__} has no register_step_pre_hook: attach a torch optimizer, or save without attach()"
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


_Range = tuple[int, int]
"""The first byte in a storage, and the one after the last."""


def _ranges_by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[_Range]]:
    """Return the bytes that the tensors have in each storage. One with gaps is left out: other code may use the gaps."""
    found: dict[int, list[_Range]] = {}
    for tensor in tensors:
        if tensor.is_contiguous() or _has_no_gaps(tensor):
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(_range_of(tensor))
    return {storage: _united(ranges) for storage, ranges in found.items()}


def _range_of(tensor: torch.Tensor) -> _Range:
    """Return the smallest range that has all elements of a tensor."""
    size = tensor.dtype.itemsize
    begin = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum([(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)])
    return begin, begin + (last + 1) * size


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor follow each other in memory, in any order of its axes."""
    expected = 1
    for step, length in sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if step != expected:
            return False
        expected *= length
    return True


def _united(ranges: list[_Range]) -> list[_Range]:
    """Return the ranges in ascending order; those that overlap or follow each other without a gap become one."""
    found: list[_Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
