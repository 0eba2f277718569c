"""The state of Paddle's objects: layers, learning-rate schedules and random generators; optimizers in `paddle_optimizer`."""

from __future__ import annotations

from typing import Any, NoReturn

import paddle
from paddle.optimizer.lr import LRScheduler

from ckpt.state.leaves import paddle_optimizer
from ckpt.state.stateful import Stateful
from ckpt.state.torch_keys import ModuleEntries

_Generator = paddle.framework.core.Generator
_GeneratorState = paddle.framework.core.GeneratorState


def as_stateful(value: object) -> Stateful | None:
    """Return the functions that read and set the state of an object of Paddle; None if its own methods are enough."""
    if isinstance(value, paddle.nn.Layer):
        return Stateful(value.state_dict, lambda state: set_layer_state(value, state))
    if isinstance(value, paddle.optimizer.Optimizer):
        return Stateful(lambda: optimizer_state(value), lambda state: set_optimizer_state(value, state))
    if type(value).__module__.startswith("paddle.distributed") and "_inner_opt" in vars(value):
        return Stateful(_refuse_wrapper, _refuse_wrapper)
    if isinstance(value, LRScheduler):
        return Stateful(lambda: schedule_state(value), lambda state: set_schedule_state(value, state))
    if isinstance(value, _Generator):
        return Stateful(lambda: _pack(value.get_state()), lambda state: value.set_state(_unpack(state)))
    return None


def _refuse_wrapper(*_: object) -> NoReturn:
    raise TypeError(
        "its state is divided over ranks or named after counters: give ckpt.adapters.paddle.ModelState the optimizer"
    )


# --- layers ----------------------------------------------------------------------------------------------------


def is_module(value: object) -> bool:
    """Return whether `value` is a layer, which has `named_parameters`."""
    return isinstance(value, paddle.nn.Layer)


def module_entries(value: Any) -> ModuleEntries:
    """Return the names of the buffers of a layer, and of its parameters that are not trained; none for other objects."""
    buffers: list[str] = []
    frozen: list[str] = []
    if not is_module(value):
        return ModuleEntries(buffers, frozen)
    for prefix, layer in value.named_sublayers(include_self=True):
        prefix = f"{prefix}." if prefix else ""
        buffers += [prefix + name for name in layer._buffers]
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.stop_gradient:
                (buffers if isinstance(layer, _NORMS) and name in _STATISTICS else frozen).append(prefix + name)
    return ModuleEntries(buffers, frozen)


_NORMS = (paddle.nn.layer.norm._BatchNormBase, paddle.nn.BatchNorm)
_STATISTICS = ("_mean", "_variance")
"""Parameters of these layers that each forward pass changes: to torch they would be buffers."""


def set_layer_state(layer: Any, state: dict[str, Any]) -> None:
    """Set the state of a layer, of which a load has filled the tensors in place and compared the names."""
    current = layer.state_dict()
    if any(tensor is not state[name] for name, tensor in current.items()):  # a layer whose hooks convert its state
        layer.set_state_dict(state)


# --- schedules and optimizers ----------------------------------------------------------------------------------

_LEFT_OUT = ("T_cur", "T_i")
"""Numbers that a step of CosineAnnealingWarmRestarts changes, and that its own state_dict() lacks."""


def schedule_state(schedule: Any) -> dict[str, Any]:
    """Return the state of a learning-rate schedule."""
    return {**schedule.state_dict(), **{name: getattr(schedule, name) for name in _LEFT_OUT if hasattr(schedule, name)}}


def set_schedule_state(schedule: Any, state: dict[str, Any]) -> None:
    """Set the state of a learning-rate schedule."""
    schedule.set_state_dict({name: value for name, value in state.items() if name not in _LEFT_OUT})
    for name in _LEFT_OUT:
        if name in state:
            setattr(schedule, name, state[name])


def param_groups(value: object) -> list[dict[str, Any]] | None:
    """Return the parameters of an optimizer as torch's `param_groups`: dicts with the key `params`; None for other objects."""
    return paddle_optimizer.groups_of(value) if isinstance(value, paddle.optimizer.Optimizer) else None


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer with its learning rate, or its schedule's state."""
    rate = optimizer._learning_rate
    known = {"LR_Scheduler": schedule_state(rate)} if isinstance(rate, LRScheduler) else {"learning_rate": float(rate)}
    return {**paddle_optimizer.state_of(optimizer), **known}


def set_optimizer_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Set the state of an optimizer; raise ValueError if it does not fit."""
    rate = optimizer._learning_rate
    key = "LR_Scheduler" if isinstance(rate, LRScheduler) else "learning_rate"
    if key not in state:
        raise ValueError(
            "it has a schedule, and the saved one a fixed learning rate"
            if key == "LR_Scheduler"
            else "it has a fixed learning rate, and the saved one a schedule: construct it with the schedule"
        )
    paddle_optimizer.set_state(optimizer, state)
    if key == "LR_Scheduler":
        set_schedule_state(rate, state[key])
    else:
        optimizer.set_lr(state[key])


# --- random generators -----------------------------------------------------------------------------------------


def is_random_generator(value: object) -> bool:
    """Return whether `value` is a random generator, of which each rank has its own."""
    return isinstance(value, _Generator)


def _pack(state: Any) -> dict[str, Any]:
    """Return the state of a generator as plain values."""
    device, seed, offset, engine = state.__getstate__()
    return {"device": device, "seed": seed, "offset": offset, "engine": bytes(engine)}


def _unpack(state: dict[str, Any]) -> Any:
    made = _GeneratorState.__new__(_GeneratorState)
    made.__setstate__((state["device"], state["seed"], state["offset"], list(state["engine"])))
    return made


def random_state() -> dict[str, Any]:
    """Return the state of the generators of the host, of the current kind of device and of model parallelism."""
    found: dict[str, Any] = {"cpu": _pack(_host_generator().get_state())}
    if (device := _device_kind()) != "cpu":
        found[device] = [_pack(state) for state in paddle.get_rng_state()]
    if (tracker := _tracker()).states_:
        found["tracker"] = {name: [_pack(s) for s in states] for name, states in tracker.get_states_tracker().items()}
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators that both the state and this process have."""
    _host_generator().set_state(_unpack(state["cpu"]))
    if (device := _device_kind()) != "cpu" and device in state:
        current = paddle.get_rng_state()
        made = [_unpack(saved) for saved in state[device][: len(current)]]
        paddle.set_rng_state(made + current[len(made) :])
    tracker = _tracker()
    saved = {name: [_unpack(s) for s in states] for name, states in state.get("tracker", {}).items() if name in tracker.states_}
    if saved:
        tracker.set_states_tracker(saved)


def _host_generator() -> Any:
    return paddle.framework.core.default_cpu_generator()


def _device_kind() -> str:
    """Return the kind of device that this process computes on, such as "gpu"."""
    return str(paddle.get_device().partition(":")[0])


def _tracker() -> Any:
    """Return the generators that layers of model parallelism draw from."""
    from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

    return get_rng_state_tracker()
