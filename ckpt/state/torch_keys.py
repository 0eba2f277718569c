"""Keys in the state of a torch module: its buffers and parameters, and keys that it would refuse."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from ckpt.errors import UnsupportedLeaf
from ckpt.state.frameworks import framework_function, usable_torch

_WRAPPER_PREFIX = "_checkpoint_wrapped_module."
"""The prefix of names in a module wrapped for activation checkpointing; `state_dict()` has the names without it."""

_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def is_module(value: object) -> bool:
    """Return whether `value` is a torch module."""
    torch = usable_torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def bare_name(name: str) -> str:
    """Return the name in `state_dict()` of a parameter or buffer, from its name in `named_parameters()`."""
    return name.replace(_WRAPPER_PREFIX, "")


class ModuleEntries(NamedTuple):
    """The names of entries in the state of a module that need other treatment than the rest."""

    buffers: list[str]
    frozen: list[str]
    """Parameters without requires_grad."""
    trained: Sequence[str] = ()
    """Other parameters. A framework whose leaves have the attribute `parameter` may leave them out."""


def has_named_parameters(value: object) -> bool:
    """Return whether `value` is a module of torch, or a layer of a framework whose parameters have names too."""
    of_framework = framework_function(value, "is_module")
    return is_module(value) or (of_framework is not None and bool(of_framework(value)))


_NO_ENTRIES = ModuleEntries([], [])


def module_entries(value: Any) -> ModuleEntries:
    """Return the buffers and parameters of a module, or of an object with a `members` method, as ModelState."""
    if not is_module(value):
        if (of_framework := framework_function(value, "module_entries")) is not None:
            found: ModuleEntries = of_framework(value)
            return found
        named = getattr(type(value), "members", None) if hasattr(type(value), "state_dict_like") else None
        return named(value) if callable(named) else _NO_ENTRIES
    require_whole_parameters(value)
    buffers: list[str] = []
    frozen: list[str] = []
    trained: list[str] = []
    for prefix, module in value.named_modules(remove_duplicate=False):
        prefix = bare_name(f"{prefix}.") if prefix else ""
        buffers += [prefix + name for name in module._buffers]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                (trained if parameter.requires_grad else frozen).append(prefix + name)
    return ModuleEntries(buffers, frozen, trained)


def require_whole_parameters(module: Any) -> None:
    """Raise UnsupportedLeaf for an engine of DeepSpeed, or a module whose parameters ZeRO stage 3 has partitioned.

    The parameters of such a module have no elements. A load of the weights of an engine would leave its master weights as they
    are, which the next step copies over the weights.
    """
    if "deepspeed" not in sys.modules:
        return
    first = next(module.parameters(), None)
    if hasattr(first, "ds_id") or any(base.__name__ == "DeepSpeedEngine" for base in type(module).__mro__):
        raise UnsupportedLeaf(
            f"DeepSpeed has partitioned the parameters of a {type(module).__name__}: give the state an EngineState(engine) of "
            "ckpt.adapters.deepspeed in place of the engine, its module and its optimizer"
        )


def mismatched_keys(module: Any, own_keys: Set[str], given_keys: Set[str]) -> tuple[list[str], list[str]]:
    """Return the keys that a module has and a load would not give it, and the keys that a load would give and it lacks; sorted.

    own_keys: the keys of the module's state; given_keys: the keys that a load would give it.

    Keys below a submodule with its own way to load are not compared. No keys are compared where the module itself has one, or
    where a load hook may change the given or missing keys.
    """
    if not is_module(module):  # a layer of another framework, which has no load hooks
        return sorted(own_keys - given_keys), sorted(given_keys - own_keys)
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
