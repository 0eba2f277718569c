"""StochasticWeightAveraging of Lightning, whose learning rates Lightning restores only at the start of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "StochasticWeightAveraging"


def continue_weight_averaging(trainer: Any) -> None:
    """Let the callback restore its scheduler in the middle of an epoch; Lightning calls it at the start of one."""
    for callback in trainer.callbacks:
        if any(base.__name__ == _NAME for base in type(callback).__mro__) and callback._scheduler_state is not None:
            with same_learning_rates(trainer):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)


@contextmanager
def same_learning_rates(trainer: Any) -> Iterator[None]:
    """Keep the learning rates of a resumed training: the scheduler of the callback sets others when it is made again."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if not any(base.__name__ == _NAME for callback in trainer.callbacks for base in type(callback).__mro__):
        groups = []
    rates = [group["lr"] for group in groups]
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
