"""A Lightning Trainer with DeepSpeedStrategy: the engine has the model and the optimizer, of which each rank has parts."""

from __future__ import annotations

from typing import Any

from ckpt.adapters.deepspeed_state import EngineState
from ckpt.adapters.lightning_packages import is_a
from ckpt.storage.base.errors import InvalidArgument


def uses_deepspeed(strategy: object) -> bool:
    """Return whether a strategy of Lightning trains with DeepSpeed."""
    return is_a(strategy, "DeepSpeedStrategy")


def require_supported_options(strategy: Any) -> None:
    """Raise InvalidArgument for options of DeepSpeedStrategy with which a resumed run would not load the engine."""
    if strategy.load_full_weights:
        raise InvalidArgument(
            "Checkpoints loads the engine of DeepSpeed, and not one file of weights: remove load_full_weights=True"
        )


def is_between_updates(strategy: Any) -> bool:
    """Return whether a strategy has an engine with gradients of a part of an update, which no step can have."""
    if not uses_deepspeed(strategy):
        return False
    engine = strategy.deepspeed_engine
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def strategy_engine_state(strategy: Any) -> EngineState:
    """Return the state of the engine; Lightning itself stores the schedulers."""
    return EngineState(strategy.deepspeed_engine, parts=("model", "optimizer", "engine"))
