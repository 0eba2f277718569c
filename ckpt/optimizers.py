"""torch optimizers: where a load puts the state of parameters for which an optimizer has none yet."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ckpt.leaves import empty_leaf


def is_optimizer(value: Any) -> bool:
    """Whether `value` is a torch optimizer, or an object around one that has its interface."""
    torch = sys.modules.get("torch")
    return torch is not None and (
        isinstance(value, torch.optim.Optimizer) or isinstance(getattr(type(value), "param_groups", None), property)
    )


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters, in the order in which `state_dict()` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def moment_like(key: str, dtype: str, shape: tuple[int, ...], parameter: Any) -> Any:
    """A new tensor for an entry of the state of a parameter, placed as that is: on its device, or a DTensor over its mesh.

    None for an entry that does not follow the parameter: of another shape, or the count of steps, which torch wants on the host
    whatever the parameter's shape.
    """
    if parameter.is_meta or shape != tuple(parameter.shape) or key == "step":
        return None
    made = empty_leaf("torch", dtype, (), {}).value
    return sys.modules["torch"].zeros_like(parameter, dtype=made.dtype, requires_grad=False)


def with_moments(optimizer: Any, current: Any, saved: Any) -> Any:
    """The state of an optimizer with a tensor for each saved one that it lacks, for a load to fill.

    current: its `state_dict()`; saved: the saved one, with something that has `dtype` and `shape` for each array.
    """
    known, wanted = (state.get("state") if isinstance(state, dict) else None for state in (current, saved))
    if not isinstance(known, dict) or not isinstance(wanted, dict):
        return current
    state = dict(known)
    for number, parameter in enumerate(parameters_of(optimizer)):
        if isinstance(entries := wanted.get(number), dict) and isinstance(have := known.get(number, {}), dict):
            state[number] = {**_missing(entries, have, parameter), **have}
    return {**current, "state": state}


def _missing(entries: Mapping[str, Any], have: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    made = {}
    for key, value in entries.items():
        if key not in have and hasattr(value, "dtype") and hasattr(value, "shape"):
            tensor = moment_like(key, value.dtype, tuple(value.shape), parameter)
            if tensor is not None:
                made[key] = tensor
    return made
