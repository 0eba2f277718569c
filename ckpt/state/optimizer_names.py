"""Names for the numbered parameters of a torch optimizer, and new tensors for state that it lacks."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ckpt.state.frameworks import framework_function, usable_torch
from ckpt.state.leaves import empty_leaf
from ckpt.state.torch_keys import bare_name


def is_optimizer(value: object) -> bool:
    """Return whether `value` is an optimizer whose state numbers its parameters: torch's, one that wraps it, or Paddle's."""
    return _is_torch_optimizer(value) or _groups_of_framework(value) is not None


def _is_torch_optimizer(value: object) -> bool:
    torch = usable_torch()
    return torch is not None and (
        isinstance(value, torch.optim.Optimizer) or isinstance(getattr(type(value), "param_groups", None), property)
    )


def _groups_of_framework(value: object) -> list[dict[str, Any]] | None:
    of_framework = framework_function(value, "param_groups")
    return None if of_framework is None else of_framework(value)


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, each with its parameters under `params`."""
    found = _groups_of_framework(optimizer)
    return list(optimizer.param_groups) if found is None else found


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters, in the order in which `state_dict()` numbers them."""
    return [parameter for group in groups_of(optimizer) for parameter in group["params"]]


# --- names -----------------------------------------------------------------------------------------------------

NamedModules = Sequence[tuple[str, Any]]
"""The modules of a state, each with its path in the state."""


class ParameterNames(NamedTuple):
    """The names of an optimizer's parameters, in the order of their numbers. None if they are unknown."""

    by_path: list[str] | None
    """The names of the leaves, from the modules in the same state as the optimizer."""
    by_group: list[str] | None
    """The names in the parameter groups, where torch got names (`param_names`)."""


def names_by_path(optimizer: Any, modules: NamedModules) -> list[str] | None:
    """Return the name of each parameter in the first module that has it; None if a parameter is in no module.

    The names are cached, because each save needs them and they change only with the parameters and the modules.
    """
    ids = [id(parameter) for parameter in parameters_of(optimizer)]
    key = (ids, [(path, id(module)) for path, module in modules])
    known = _names_cache.get(optimizer)
    if known is None or known[0] != key:
        known = _names_cache[optimizer] = key, _names_by_path(ids, modules)
    return known[1]


_names_cache: WeakKeyDictionary[Any, tuple[tuple[list[int], list[tuple[str, int]]], list[str] | None]] = WeakKeyDictionary()


def _names_by_path(ids: list[int], modules: NamedModules) -> list[str] | None:
    names: dict[int, str] = {}
    for path, module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), bare_name(f"{path}.{name}" if path else name))
    found = [names.get(one, "") for one in ids]
    return found if found and all(found) else None


def parameter_names(optimizer: Any, modules: NamedModules) -> ParameterNames:
    """Return the current names of an optimizer's parameters."""
    return ParameterNames(names_by_path(optimizer, modules), names_by_group(groups_of(optimizer)))


def names_by_group(groups: object) -> list[str] | None:
    """Return the `param_names` of all parameter groups, one after the other; None if a group has none."""
    found: list[str] = []
    for group in groups if isinstance(groups, list) else []:
        names = group.get("param_names") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        found += names
    return found or None


# --- new state -------------------------------------------------------------------------------------------------


def moment_like(key: str, dtype: str, shape: tuple[int, ...], parameter: Any) -> Any:
    """Return a new tensor of zeros for an entry of a parameter's state, on its device or as a DTensor over its mesh.

    None for an entry that does not have the layout of the parameter: one of another shape, or the step count, which torch
    keeps on the host.

    key: the name of the entry, such as exp_avg; dtype, shape: those that were saved.
    """
    if parameter.is_meta or shape != tuple(parameter.shape) or key == "step":
        return None
    made = empty_leaf("torch", dtype, (), {}).value
    return sys.modules["torch"].zeros_like(parameter, dtype=made.dtype, requires_grad=False)


def add_missing_moments(optimizer: Any, current: Any, saved: Any) -> Any:
    """Return the state of an optimizer with a new tensor for each saved one that it lacks, for a load to fill.

    current: the optimizer's `state_dict()`.
    saved: the saved `state_dict()`; each array is an object with `dtype` and `shape`.
    """
    if not _is_torch_optimizer(optimizer):
        return current
    current_states, saved_states = (state.get("state") if isinstance(state, dict) else None for state in (current, saved))
    if not isinstance(current_states, dict) or not isinstance(saved_states, dict):
        return current
    state = dict(current_states)
    for number, parameter in enumerate(parameters_of(optimizer)):
        if isinstance(entries := saved_states.get(number), dict) and isinstance(have := current_states.get(number, {}), dict):
            state[number] = {**_missing_moments(entries, have, parameter), **have}
    return {**current, "state": state}


def _missing_moments(entries: Mapping[str, Any], existing: Container[str], parameter: Any) -> dict[str, Any]:
    made = {}
    for key, value in entries.items():
        if key not in existing and hasattr(value, "dtype") and hasattr(value, "shape"):
            tensor = moment_like(key, value.dtype, tuple(value.shape), parameter)
            if tensor is not None:
                made[key] = tensor
    return made
