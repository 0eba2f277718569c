"""Whether a Trainer has run the end of the epoch in which it saves a step.

A step of `save_steps` is saved before the end of its epoch, and a step of save_strategy="epoch" after it. An end has an
evaluation and callbacks, which draw random numbers and count for early stopping. So the continuation must run it exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

CAN_CHOOSE_POSITION = hasattr(Trainer, "_init_training_state")
"""Whether this version of transformers lets CkptTrainer choose the position in the data from which it continues."""


class EpochEnd(TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
    """Notes the ends of epochs. It must be the first callback.

    before_end: called before the other callbacks of an end.
    """

    def __init__(self, before_end: Callable[[], None]) -> None:
        self.has_passed = False
        """Whether no update has begun since the end of an epoch."""
        self._before_end = before_end

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.has_passed = False

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._before_end()
        self.has_passed = True
