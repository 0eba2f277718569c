"""Objects of jax programs that are taken as they are: flax.nnx modules and states, equinox states, registered pytrees.

A pytree is immutable: a load makes a new one with the structure of `like`, so that its static parts are those of `like`. An nnx
module, state or variable is filled in place. Packages above jax are looked up in `sys.modules`, never imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax

from ckpt.state.named_state import require_saved_names
from ckpt.state.stateful import Stateful

Children = list[tuple[tuple[Any, ...], Any]]


def as_stateful(value: object) -> Stateful | None:
    """Return the functions that read and set the state of an object of flax.nnx or equinox; None for other objects."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None:
        if isinstance(value, nnx.State):
            return _entries_of_like(lambda: _plain_dict(nnx, value), lambda new: _replace_entries(nnx, value, new))
        if isinstance(value, nnx.Variable):
            return Stateful(lambda: _raw_value(value), lambda new: nnx.update(value, new))
        if isinstance(value, getattr(nnx, "Pytree", None) or nnx.Object):
            return _equal_entries(value, lambda: _module_state(nnx, value), lambda new: nnx.update(value, new))
    layers = sys.modules.get("equinox.nn")
    if layers is not None and isinstance(value, layers.State):
        found = _equal_entries(value, lambda: _equinox_state(value), lambda new: _new_equinox_state(value, new))
        return dataclasses.replace(found, replaces=True)
    return None


def as_pytree(value: object) -> Stateful | None:
    """Return the functions for a value of a class that is registered as a pytree; None for other values.

    Dicts, lists, tuples and dataclasses have stored forms of their own. `set` returns the new pytree.
    """
    if isinstance(value, (dict, list, tuple)) or dataclasses.is_dataclass(value):
        return None
    children, structure = _flatten_one_level(value)
    if structure is None:
        return None
    names = leaf_names(children)

    def build(new: dict[str, Any]) -> Any:
        return structure.unflatten([new[name] for name in names])

    values = dict(zip(names, (child for _, child in children), strict=True))
    if isinstance(value, Mapping):  # as for a dict, `like` may be a part of what was saved
        found = _entries_of_like(lambda: dict(values), build)
    else:
        found = _equal_entries(value, lambda: dict(values), build)
    return dataclasses.replace(found, replaces=True)


def _entries_of_like(get: Callable[[], dict[Any, Any]], put: Callable[[Any], Any]) -> Stateful:
    """Return the functions of an object into which a load puts the entries that it has, of those that were saved."""
    return Stateful(get, put, lambda saved, everything: get())


def _equal_entries(value: object, get: Callable[[], dict[Any, Any]], put: Callable[[Any], Any]) -> Stateful:
    """Return the functions of an object that must have all entries that were saved, unless only some are loaded."""

    def like(saved: object, everything: bool) -> dict[Any, Any]:
        state = get()
        if everything:
            require_saved_names(state, saved, type(value).__name__)
        return state

    return Stateful(get, put, like)


def static_fields(value: Any) -> frozenset[str]:
    """Return the fields of a dataclass that its registration as a pytree makes static; none if it is not registered."""
    children, structure = _flatten_one_level(value)
    if structure is None or not all(isinstance(path[0], jax.tree_util.GetAttrKey) for path, _ in children):
        return frozenset()
    return frozenset(field.name for field in dataclasses.fields(value)) - {path[0].name for path, _ in children}


def keeps_functions(value: object) -> bool:
    """Return whether functions inside of an object count as static: in equinox modules, where activations are leaves."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(value, equinox.Module)


def advice(value: object) -> str | None:
    """Return what to store in place of an object that is refused; None for an object that this file does not know."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(value, linen.Module):
        return "a linen module has no arrays: store the variables that its init() returned"
    return None


def leaf_names(leaves: Children) -> list[str]:
    """Return a different name for each leaf; in {"a.b": x, "a": {"b": y}} two leaves have one path."""
    names: dict[str, None] = {}
    for path, _ in leaves:
        name = ".".join(jax.tree_util.keystr((key,), simple=True) for key in path) or "value"
        while name in names:
            name += "~"
        names[name] = None
    return list(names)


def _flatten_one_level(value: object) -> tuple[Children, Any]:
    """Return the children of a pytree, and its structure, which is None for a value of a class that is not registered."""
    children, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    return (children, None) if len(children) == 1 and not children[0][0] else (children, structure)


def _module_state(nnx: ModuleType, module: Any) -> dict[Any, Any]:
    """Return the values of the variables of a module, without those that its last call left behind (sow)."""
    return _plain_dict(nnx, nnx.state(module, nnx.Not(nnx.Intermediate)))


def _is_variable(nnx: ModuleType, value: object) -> bool:
    return isinstance(
        value, (nnx.Variable, vars(nnx).get("VariableState", nnx.Variable))
    )  # a class of its own before flax 0.12


def _plain_dict(nnx: ModuleType, state: Mapping[Any, Any]) -> dict[Any, Any]:
    found = {}
    for key, value in state.items():
        if _is_variable(nnx, value):
            found[key] = _raw_value(value)
        else:
            found[key] = _plain_dict(nnx, value) if isinstance(value, Mapping) else value
    return found


def _raw_value(variable: Any) -> Any:
    """Return the value of a variable, without the hooks that its metadata may have; of a reference, the array."""
    value = (
        variable.get_raw_value() if hasattr(type(variable), "get_raw_value") else getattr(variable, "raw_value", variable.value)
    )
    return value[...] if type(value).__name__ in ("Ref", "ArrayRef") else value


def _replace_entries(nnx: ModuleType, state: Any, new: dict[Any, Any]) -> None:
    for key, value in new.items():
        old = state[key]
        if _is_variable(nnx, old):
            state[key] = old.replace(value)  # a new variable: the old one may be that of a module
        elif isinstance(old, Mapping):
            _replace_entries(nnx, old, value)
        else:
            state[key] = value


def _equinox_state(state: Any) -> dict[str, Any]:
    values, keys = state.tree_flatten()
    if not all(isinstance(key, (str, int)) for key in keys):
        raise ValueError("its entries have no names: make it by equinox.nn.make_with_state")
    return {str(key): value for key, value in zip(keys, values, strict=True)}


def _new_equinox_state(like: Any, new: dict[str, Any]) -> Any:
    keys = like.tree_flatten()[1]
    return type(like).tree_unflatten(keys, [new[str(key)] for key in keys])
