"""The start of an epoch of a Lightning Trainer that is resumed in its middle: callbacks set there what the epoch needs.

Newer versions of Lightning do not call `on_train_epoch_start` in such an epoch. Callbacks such as GradientAccumulationScheduler
derive the state of the Trainer from the number of the epoch, and store none, so the hook is called for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.adapters.lightning_packages import is_a

FINDERS = ("LearningRateFinder", "BatchSizeFinder")
"""Callbacks that run trial steps. What they have found is a part of the saved state."""


def is_finder(callback: object) -> bool:
    """Return whether a callback searches a learning rate or a batch size by trial steps."""
    return is_a(callback, *FINDERS)


@contextmanager
def repeated_epoch_start(trainer: Any, callback_states: dict[str, Any]) -> Iterator[None]:
    """Let the block call the hooks of the start of an epoch, and then set again what was saved after they had run before.

    The learning rates, the buffers of the model and the states of the callbacks are as saved. Finders are not called.

    callback_states: the states of the callbacks in the checkpoint of Lightning.
    """
    rates = [(group, group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    model = trainer.lightning_module
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    callbacks = trainer.callbacks
    trainer.callbacks = [each for each in callbacks if not is_finder(each)]
    try:
        yield
    finally:
        trainer.callbacks = callbacks
    for group, rate in rates:
        group["lr"] = rate
    for name, buffer in model.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.detach().copy_(buffers[name])
    for callback in callbacks:
        _load_again(callback, callback_states)


def _load_again(callback: Any, states: dict[str, Any]) -> None:
    """Load the saved state of a callback, which its hook may have changed. `_restarting` stays as it is."""
    state = states.get(callback.state_key, states.get(callback._legacy_state_key))
    if state:
        is_restarting = getattr(callback, "_restarting", None)  # of BaseFinetuning, which sets it in load_state_dict
        callback.load_state_dict(copy.deepcopy(state))
        if is_restarting is not None:
            callback._restarting = is_restarting
