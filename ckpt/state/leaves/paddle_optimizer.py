"""The state of a Paddle optimizer by the numbers of its parameters.

Paddle names an accumulator after a counter of the process, as in `linear_0.w_0_moment1_0`, so that the same tensor has another
name where a process has made other layers before. Here, an optimizer's state has the form that torch uses:

    {"state": {number: {"moment1": …, "beta1_pow_acc": …, "master_weight": …}}, "param_groups": [{"params": [0, 1, …]}]}
"""

from __future__ import annotations

from typing import Any

import paddle

MASTER = "master_weight"


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, each with its parameters under `params`."""
    groups = optimizer._param_groups
    if groups and isinstance(groups[0], dict):
        return [{"params": list(group["params"])} for group in groups]
    return [{"params": list(groups or [])}]


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, in the order of their numbers."""
    return [parameter for group in groups_of(optimizer) for parameter in group["params"]]


def state_of(optimizer: Any) -> dict[str, Any]:
    """Return the tensors of an optimizer by the numbers of its parameters; raise TypeError if one belongs to none."""
    numbers = iter(range(len(parameters_of(optimizer))))
    groups = [{"params": [next(numbers) for _ in group["params"]]} for group in groups_of(optimizer)]
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        return {"lbfgs": dict(optimizer.state), "param_groups": groups}
    if "_optim" in vars(optimizer):
        raise TypeError("it divides its state over ranks: give the layer and the optimizer to ckpt.adapters.paddle.ModelState")
    if hasattr(optimizer, "inner_optimizer"):
        raise TypeError("it wraps another optimizer: store its inner_optimizer, and leave this one out")
    _take_up_loaded_state(optimizer)
    found = {number: accumulators_of(optimizer, parameter) for number, parameter in enumerate(parameters_of(optimizer))}
    known = {id(tensor) for entries in found.values() for tensor in entries.values()}
    for name, by_parameter in optimizer._accumulators.items():
        if unknown := [owner for owner, tensor in by_parameter.items() if id(tensor) not in known]:
            raise TypeError(
                f"its {name} of {unknown[0]} belongs to none of its parameters: give it all parameters that it updates"
            )
    return {"state": {number: entries for number, entries in found.items() if entries}, "param_groups": groups}


def accumulators_of(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """Return the tensors that an optimizer has for a parameter, by their names without the optimizer's own name."""
    master = getattr(optimizer, "_master_weights", {}).get(parameter.name)
    prefix = f"{optimizer._name}_" if optimizer._name is not None else ""
    owners = [parameter.name] if master is None else [master.name, parameter.name]
    found = {}
    for name, by_parameter in optimizer._accumulators.items():
        for owner in owners:
            if owner in by_parameter:
                found[name.removeprefix(prefix)] = by_parameter[owner]
                break
    if master is not None:
        found[MASTER] = master
    return found


def set_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Set the tensors of an optimizer, of which a load has filled the existing ones in place; raise ValueError for a misfit."""
    parameters = parameters_of(optimizer)
    if ("lbfgs" in state) != isinstance(optimizer, paddle.optimizer.LBFGS):
        raise ValueError("the saved optimizer is of another kind")
    saved_count = sum(len(group["params"]) for group in state["param_groups"])
    if saved_count != len(parameters):
        raise ValueError(f"it has {len(parameters)} parameters, and the saved one {saved_count}")
    if "lbfgs" in state:
        optimizer.state.clear()
        optimizer.state.update(state["lbfgs"])
        return
    optimizer._accumulators_holder = {}
    with paddle.no_grad():
        for number, parameter in enumerate(parameters):
            set_accumulators(optimizer, parameter, state["state"].get(number, {}), str(number))


def set_accumulators(optimizer: Any, parameter: Any, saved: dict[str, Any], name: str) -> None:
    """Set the tensors of one parameter, and create those that do not exist yet; with no saved ones, remove them.

    name: the name of the parameter in messages.
    """
    if not saved:
        _remove_accumulators(optimizer, parameter)
        return
    have = accumulators_of(optimizer, parameter)
    if have.keys() != saved.keys():
        create_accumulators(optimizer, parameter)
        have = accumulators_of(optimizer, parameter)
    if have.keys() != saved.keys():
        both = f"{', '.join(sorted(have)) or 'nothing'}; the saved one had {', '.join(sorted(saved))}"
        raise ValueError(f"for parameter {name} it has {both}: construct it as it was when saved")
    for key, tensor in saved.items():
        if tensor is have[key]:
            continue
        if tensor.shape != have[key].shape or tensor.dtype != have[key].dtype:
            raise ValueError(
                f"for {key} of parameter {name} it needs {have[key].dtype} of shape {list(have[key].shape)}, the saved one is "
                f"{tensor.dtype} of shape {list(tensor.shape)}"
            )
        if have[key].is_dist():
            from ckpt.state.leaves.paddle_dist import copy_from_whole

            copy_from_whole(have[key], tensor)
        else:
            have[key].copy_(tensor, True)


def create_accumulators(optimizer: Any, parameter: Any) -> None:
    """Create the tensors of a parameter, as the first step of the optimizer does."""
    block = paddle.base.framework.default_main_program().global_block()
    group = next((g for g in optimizer._param_groups if isinstance(g, dict) and any(p is parameter for p in g["params"])), None)
    optimizer._create_accumulators(block, [parameter] if group is None else {**group, "params": [parameter]})


def _remove_accumulators(optimizer: Any, parameter: Any) -> None:
    master = getattr(optimizer, "_master_weights", {}).pop(parameter.name, None)
    for by_parameter in optimizer._accumulators.values():
        by_parameter.pop(parameter.name, None)
        if master is not None:
            by_parameter.pop(master.name, None)
    optimizer._already_create_accumulator.discard(parameter.name)


def _take_up_loaded_state(optimizer: Any) -> None:
    """Create the tensors of a state that paddle's own set_state_dict() has kept for the first step."""
    holder = optimizer._accumulators_holder
    if not holder or any(optimizer._accumulators.values()):
        return
    with paddle.no_grad():
        for parameter in parameters_of(optimizer):
            if any(name.startswith(f"{parameter.name}_") for name in holder):
                create_accumulators(optimizer, parameter)
