"""StochasticWeightAveraging of Lightning: its learning rates in a resumed run, and its state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.adapters.lightning_packages import has_callback

_SCHEDULER, _FUNCTION = "scheduler_state", "anneal_func"


@contextmanager
def same_learning_rates(trainer: Any) -> Iterator[None]:
    """Keep the learning rates of a resumed training run: the scheduler of the callback sets others when it is made again."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if not has_callback(trainer, "StochasticWeightAveraging"):
        groups = []
    rates = [group["lr"] for group in groups]
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def without_annealing_functions(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without the function that older versions of torch store in the state of the scheduler SWALR.

    The callback creates this scheduler again, with the function from its own arguments.
    """
    found = dict(checkpoint)
    if isinstance(found.get("lr_schedulers"), list):
        found["lr_schedulers"] = [_without_function(state) for state in found["lr_schedulers"]]
    if isinstance(found.get("callbacks"), dict):
        found["callbacks"] = {
            name: {**state, _SCHEDULER: _without_function(state[_SCHEDULER])} if _is_of_scheduler(state) else state
            for name, state in found["callbacks"].items()
        }
    return found


def _is_of_scheduler(state: object) -> bool:
    return isinstance(state, dict) and _SCHEDULER in state


def _without_function(state: Any) -> Any:
    if not isinstance(state, dict) or not callable(state.get(_FUNCTION)):
        return state
    return {key: value for key, value in state.items() if key != _FUNCTION}
