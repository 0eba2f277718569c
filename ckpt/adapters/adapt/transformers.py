"""`Trainer.train` of transformers under `ckpt-run --adapt`: it saves and resumes as `CheckpointedTrainer` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt.adapters.adapt.intervals import describe, interval_from_env
from ckpt.adapters.adapt.startup import hooks
from ckpt.adapters.transformers import CheckpointedTrainer
from ckpt.adapters.transformers_run import TrainerRun, require_supported
from ckpt.storage.base.errors import InvalidArgument
from ckpt.training.save_interval import Every

_NAME = "transformers.Trainer"


def train(original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Train by `original`, the method of Trainer; save to and resume from the repository of this training run.

    While it trains, the trainer has a class that is derived from `CheckpointedTrainer` and from its own class. A step of the
    repository takes precedence over `resume_from_checkpoint`, because it was saved later.
    """
    if isinstance(trainer, CheckpointedTrainer):
        return original(trainer, resume_from_checkpoint, *args, **kwargs)
    try:
        require_supported(trainer, args[0] if args else kwargs.get("trial"))
    except InvalidArgument as error:
        hooks.print_refused(_NAME, error)
        return original(trainer, resume_from_checkpoint, *args, **kwargs)
    with hooks.training(_NAME) as url:
        if url is None:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        plain = trainer.__class__
        trainer._ckpt_url, trainer._ckpt_run = url, None
        trainer.__class__ = _derived(plain)
        try:
            with TrainerRun(trainer, url, every=_interval(trainer)) as run:
                folder = run.choose(True if run.has_steps() else resume_from_checkpoint)
                hooks.print_saves(_NAME, url, _describe_interval(trainer), run.describe_start())
                return trainer._ckpt_train(run, folder, lambda chosen: original(trainer, chosen, *args, **kwargs))
        finally:
            trainer.__class__ = plain


def _derived(plain: type) -> type:
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (CheckpointedTrainer, plain), names)


def _strategy(trainer: Any) -> str:
    strategy = trainer.args.save_strategy
    return str(getattr(strategy, "value", strategy))


def _interval(trainer: Any) -> Every:
    """Return how often to save where the TrainingArguments turn saves off; None if they say when to save."""
    return interval_from_env() if _strategy(trainer) == "no" else None


def _describe_interval(trainer: Any) -> str:
    strategy, steps = _strategy(trainer), trainer.args.save_steps
    if strategy == "steps":
        return f"every {steps} steps" if steps >= 1 else f"after each {steps:.1%} of its steps"
    return {"epoch": "after each epoch", "best": "at each best model"}.get(strategy) or describe(_interval(trainer))
