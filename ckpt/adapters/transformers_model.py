"""The model of a Trainer as an entry of a state: whole, the adapters of a peft model, or the engine of DeepSpeed."""

from __future__ import annotations

from typing import Any

from ckpt.adapters.deepspeed_state import EngineState
from ckpt.adapters.peft import AdapterState, is_peft_model
from ckpt.adapters.torch import ModelState
from ckpt.adapters.transformers_deepspeed import trainer_engine_state


def model_state(trainer: Any, optimizer: Any = None) -> ModelState | EngineState:
    """Return the state of the model of a Trainer, and of its optimizer if that is given."""
    if trainer.is_deepspeed_enabled:
        return trainer_engine_state(trainer, is_model_only=optimizer is None)
    kind = AdapterState if is_peft_model(trainer.model) else ModelState
    return kind(trainer.model, getattr(optimizer, "optimizer", optimizer))
