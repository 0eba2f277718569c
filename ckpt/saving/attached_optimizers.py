"""The class AttachedOptimizers, whose memory a save copies while the next forward and backward run (lazy staging)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.state.leaves.base import ArrayLeaf
from ckpt.storage.base.errors import CkptError


class AttachedOptimizers:
    """The attached torch optimizers, and the memory of their parameters and moments at the start of the last save."""

    def __init__(self, before_step: Callable[..., None]) -> None:
        """before_step: called before each step of an attached optimizer."""
        self._before_step = before_step
        self._optimizers: list[Any] = []
        self._hooks: list[Any] = []
        self._memory: frozenset[int] = frozenset()

    def add(self, optimizer: Any) -> None:
        """Attach an optimizer, or the one inside of wrappers; raise CkptError where there is no torch optimizer."""
        inner, hook = _register_step_hook(optimizer, self._before_step)
        self._hooks.append(hook)
        self._optimizers.append(inner)

    def detach(self) -> None:
        """Remove the hooks of all optimizers."""
        for hook in self._hooks:
            hook.remove()

    def find_memory(self) -> None:
        """Find the addresses of all parameters and moments, which may differ from those of the previous save."""
        found: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(map(_data_address, group["params"]))
            for state in optimizer.state.values():
                found.update(_data_address(v) for v in state.values() if hasattr(v, "data_ptr"))
        found.discard(0)
        self._memory = frozenset(found)

    def has(self, leaf: ArrayLeaf) -> bool:
        """Return whether a leaf is a parameter or a moment of an attached optimizer."""
        return leaf.kind == "torch" and leaf.value.data_ptr() in self._memory


def _register_step_hook(optimizer: Any, before_step: Callable[..., None]) -> tuple[Any, Any]:
    """Register a hook before each step of the optimizer; return the optimizer inside any wrappers, and the hook."""
    inner = optimizer
    while inner is not None:
        try:
            return inner, inner.register_step_pre_hook(before_step)
        except AttributeError:  # raised also by a wrapper that inherits the method but was not initialised as an optimizer
            inner = getattr(inner, "optimizer", None)
    raise CkptError(f"{type(optimizer).__name__} has no register_step_pre_hook: lazy staging needs a torch optimizer")


def _data_address(tensor: Any) -> int:
    """Return the address of a tensor's memory, or of the local shard of a DTensor."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())
