"""torch modules: which entries of their state are buffers, and which saved entries a module would refuse."""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any, NamedTuple

_WRAPPER_PREFIX = "_checkpoint_wrapped_module."
"""Where activation checkpointing puts a module. The names in its state are those of the bare one."""

_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def is_module(value: Any) -> bool:
    """Whether `value` is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def bare_name(name: str) -> str:
    """The name that a parameter or buffer has in the state of a module, from that of `named_parameters()`."""
    return name.replace(_WRAPPER_PREFIX, "")


class ModuleEntries(NamedTuple):
    """Entries in the state of a module that are treated differently from its other ones, by name."""

    buffers: list[str]
    frozen: list[str]
    """Parameters without requires_grad."""


_NO_ENTRIES = ModuleEntries([], [])


def module_entries(value: Any) -> ModuleEntries:
    """Those of `value`: a torch module, or an object that has such a method, as ModelState."""
    if not is_module(value):
        named = getattr(type(value), "members", None) if hasattr(type(value), "state_dict_like") else None
        return named(value) if callable(named) else _NO_ENTRIES
    buffers, frozen = [], []
    for prefix, module in value.named_modules(remove_duplicate=False):
        prefix = bare_name(f"{prefix}.") if prefix else ""
        buffers += [prefix + name for name in module._buffers]
        frozen += [prefix + name for name, p in module._parameters.items() if p is not None and not p.requires_grad]
    return ModuleEntries(buffers, frozen)


def mismatched_keys(module: Any, own_keys: Set[str], given_keys: Set[str]) -> tuple[list[str], list[str]]:
    """The entries that a module has and is not given, and those it is given and has not; sorted.

    has: the keys of its state. Those below a submodule that loads in its own way are left to it, and all of them where
    the whole does, or where a hook may change what is given or what is missed.
    """
    base = sys.modules["torch"].nn.Module
    parts = list(module.named_modules(remove_duplicate=False))
    hooked = any(getattr(part, hooks, None) for _, part in parts for hooks in _LOAD_HOOKS)
    if hooked or type(module).load_state_dict is not base.load_state_dict:
        return [], []
    own_way = tuple(
        f"{name}." if name else ""
        for name, m in parts if type(m)._load_from_state_dict is not base._load_from_state_dict
    )  # fmt: skip
    missing, unknown = (
        [key for key in sorted(keys) if not key.startswith(own_way)] for keys in (own_keys - given_keys, given_keys - own_keys)
    )
    return missing, unknown
