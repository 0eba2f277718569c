"""torch optimizers, whose state is numbered: which parameter a number means, and where new state of a parameter goes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ckpt.state.leaves import empty_leaf
from ckpt.state.torch_keys import bare_name


def is_optimizer(value: Any) -> bool:
    """Whether `value` is a torch optimizer, or an object around one that has its interface."""
    torch = sys.modules.get("torch")
    return torch is not None and (
        isinstance(value, torch.optim.Optimizer) or isinstance(getattr(type(value), "param_groups", None), property)
    )


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters, in the order in which `state_dict()` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --- names -----------------------------------------------------------------------------------------------------

NamedModules = Sequence[tuple[str, Any]]
"""The modules of a state, each with its path there."""


class ParameterNames(NamedTuple):
    """What the parameters of an optimizer are called, in the order of their numbers. None where that is not known."""

    by_path: list[str] | None
    """By the module beside the optimizer: the names of the leaves."""
    by_group: list[str] | None
    """By the optimizer itself, where torch was given names (`param_names`)."""


def names_by_path(optimizer: Any, modules: NamedModules) -> list[str] | None:
    """The name of each parameter by the first module that has it; None where one is of none of them.

    The names of an optimizer are remembered: each save asks for them, and they change only with its parameters.
    """
    ids = [id(parameter) for parameter in parameters_of(optimizer)]
    key = (ids, [(path, id(module)) for path, module in modules])
    known = _names_cache.get(optimizer)
    if known is None or known[0] != key:
        known = _names_cache[optimizer] = key, _names_by_path(ids, modules)
    return known[1]


_names_cache: WeakKeyDictionary[Any, tuple[Any, list[str] | None]] = WeakKeyDictionary()


def _names_by_path(ids: list[int], modules: NamedModules) -> list[str] | None:
    names: dict[int, str] = {}
    for path, module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), bare_name(f"{path}.{name}" if path else name))
    found = [names.get(one, "") for one in ids]
    return found if found and all(found) else None


def parameter_names(optimizer: Any, modules: NamedModules) -> ParameterNames:
    """What the parameters of an optimizer are called now."""
    return ParameterNames(names_by_path(optimizer, modules), names_by_group(optimizer.param_groups))


def names_by_group(groups: Any) -> list[str] | None:
    """The names that each parameter group of torch has, one after the other."""
    found: list[str] = []
    for group in groups if isinstance(groups, list) else []:
        names = group.get("param_names") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        found += names
    return found or None


# --- new state -------------------------------------------------------------------------------------------------


def moment_like(key: str, dtype: str, shape: tuple[int, ...], parameter: Any) -> Any:
    """A new tensor for an entry of the state of a parameter, placed as that is: on its device, or a DTensor over its mesh.

    None for an entry that does not follow the parameter: of another shape, or the count of steps, which torch wants on the host
    whatever the parameter's shape.
    """
    if parameter.is_meta or shape != tuple(parameter.shape) or key == "step":
        return None
    made = empty_leaf("torch", dtype, (), {}).value
    return sys.modules["torch"].zeros_like(parameter, dtype=made.dtype, requires_grad=False)


def add_missing_moments(optimizer: Any, current: Any, saved: Any) -> Any:
    """The state of an optimizer with a tensor for each saved one that it lacks, for a load to fill.

    current: its `state_dict()`; saved: the saved one, with something that has `dtype` and `shape` for each array.
    """
    current_states, saved_states = (state.get("state") if isinstance(state, dict) else None for state in (current, saved))
    if not isinstance(current_states, dict) or not isinstance(saved_states, dict):
        return current
    state = dict(current_states)
    for number, parameter in enumerate(parameters_of(optimizer)):
        if isinstance(entries := saved_states.get(number), dict) and isinstance(have := current_states.get(number, {}), dict):
            state[number] = {**_missing_moments(entries, have, parameter), **have}
    return {**current, "state": state}


def _missing_moments(entries: Mapping[str, Any], existing: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    made = {}
    for key, value in entries.items():
        if key not in existing and hasattr(value, "dtype") and hasattr(value, "shape"):
            tensor = moment_like(key, value.dtype, tuple(value.shape), parameter)
            if tensor is not None:
                made[key] = tensor
    return made
