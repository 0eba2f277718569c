"""torch modules: which entries of their state are buffers, and which saved entries a module would refuse."""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def is_module(value: Any) -> bool:
    """Whether `value` is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def buffer_names(value: Any) -> list[str]:
    """The names that buffers have in the state of `value`: a torch module, or an object that has this method, as ModelState."""
    if is_module(value):
        return [name for name, _ in value.named_buffers(remove_duplicate=False)]
    named = getattr(type(value), "buffer_names", None) if hasattr(type(value), "state_dict_like") else None
    return list(named(value)) if callable(named) else []


def strangers(module: Any, has: Set[str], given: Set[str]) -> tuple[list[str], list[str]]:
    """The entries that a module has and is not given, and those it is given and has not; sorted.

    has: the keys of its state. Those below a submodule that loads in its own way are left to it, and all of them where
    the whole does, or where a hook may change what is given or what is missed.
    """
    base = sys.modules["torch"].nn.Module
    parts = list(module.named_modules(remove_duplicate=False))
    hooked = any(getattr(part, hooks, None) for _, part in parts for hooks in _HOOKS)
    if hooked or type(module).load_state_dict is not base.load_state_dict:
        return [], []
    own_way = tuple(
        f"{name}." if name else ""
        for name, m in parts if type(m)._load_from_state_dict is not base._load_from_state_dict
    )  # fmt: skip
    missing, unknown = ([key for key in sorted(keys) if not key.startswith(own_way)] for keys in (has - given, given - has))
    return missing, unknown
