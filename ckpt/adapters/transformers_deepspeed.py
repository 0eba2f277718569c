"""A Trainer of transformers with DeepSpeed: the state of its engine, and which folders DeepSpeed itself loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import trainer as trainer_module

from ckpt.adapters.deepspeed_state import EngineState, only_step_changes_weights
from ckpt.adapters.peft import is_peft_model

__all__ = ["only_step_changes_weights", "skipped_engine_loads", "trainer_engine_state"]

_NAME = "deepspeed_load_checkpoint"


def trainer_engine_state(trainer: Any, is_model_only: bool) -> EngineState:
    """Return the state of the engine of a Trainer; of a peft model, only the parameters that are trained."""
    parts = ("model",) if is_model_only else ("model", "optimizer", "lr_scheduler", "engine")
    return EngineState(trainer.model_wrapped, parts=parts, exclude_frozen=is_peft_model(trainer.model))


@contextmanager
def skipped_engine_loads(owns: Callable[[str | None], bool]) -> Iterator[None]:
    """Let a Trainer load no DeepSpeed checkpoint from folders for which `owns` is true: they have none.

    Trainer calls this function of its module, and offers no method to override.
    """
    load = getattr(trainer_module, _NAME)

    def load_others(engine: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if not owns(path):
            load(engine, path, *args, **kwargs)

    setattr(trainer_module, _NAME, load_others)
    try:
        yield
    finally:
        setattr(trainer_module, _NAME, load)
