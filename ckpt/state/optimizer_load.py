"""Loads the state of a torch optimizer with the dtypes that were saved.

torch casts each tensor of the state to the dtype of its parameter, except for `step`. This would round fp32 moments of bf16
parameters, and turn counters and masks into floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpt.state.frameworks import usable_torch


def loads_by_parameter(value: object) -> bool:
    """Return whether `value` is an optimizer of torch, whose `load_state_dict` casts."""
    torch = usable_torch()
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def load_optimizer_state(optimizer: Any, load: Callable[[Any], Any], saved: Any) -> None:
    """Load the state of an optimizer, with the saved tensors in place of those that torch casts.

    load: the `load_state_dict` of the optimizer.
    saved: a state as `state_dict()` returns it; it may share tensors with the optimizer.

    Hooks of the optimizer, and a class with its own `load_state_dict`, may change the state before or after torch casts it.
    """
    given = [saved]
    is_undone = False

    def note_given(_: Any, state: Any) -> None:
        given[0] = state

    def undo(_: Any) -> None:
        nonlocal is_undone
        is_undone = True
        _undo_all_casts(optimizer, given[0])

    handles = []
    if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # a wrapper may lack what the constructor of torch sets
        handles.append(optimizer.register_load_state_dict_pre_hook(note_given))
        handles.append(optimizer.register_load_state_dict_post_hook(undo, prepend=True))
    try:
        load(saved)
    finally:
        for handle in handles:
            handle.remove()
    if not is_undone:  # a `load_state_dict` of its own, which calls no hooks
        _undo_all_casts(optimizer, saved)


def _undo_all_casts(optimizer: Any, saved: Any) -> None:
    if not (isinstance(saved, dict) and isinstance(saved.get("state"), dict) and isinstance(saved.get("param_groups"), list)):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(numbers) != len(parameters):
        return
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded = optimizer.state.get(parameter)
        if isinstance(loaded, dict) and isinstance(saved["state"].get(number), dict):
            _undo_casts(loaded, saved["state"][number], parameter)


def _undo_casts(loaded: Any, saved: Mapping[Any, Any], parameter: Any) -> None:
    for key, value in saved.items():
        if key != "step" and key in loaded:  # torch casts `step` only if a kernel needs it
            loaded[key] = _without_cast(loaded[key], value, parameter)


def _without_cast(loaded: Any, saved: Any, parameter: Any) -> Any:
    """Return the saved tensor on the device of the loaded one if that was cast, or else the loaded value."""
    if isinstance(loaded, dict) and isinstance(saved, dict):
        _undo_casts(loaded, saved, parameter)
    elif type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(loaded)(_without_cast(*pair, parameter) for pair in zip(loaded, saved, strict=True))
    elif hasattr(loaded, "dtype") and hasattr(saved, "dtype") and loaded.dtype == parameter.dtype != saved.dtype:
        return saved.to(device=loaded.device) if loaded.shape == saved.shape else loaded
    return loaded
