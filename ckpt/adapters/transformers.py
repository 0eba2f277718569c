"""Trainer of transformers with checkpoints in a ckpt repository, and a mixin for subclasses of Trainer, such as those of TRL.

Usage:

    from ckpt.adapters.transformers import CkptTrainer
    trainer = CkptTrainer(model, args, train_dataset=dataset, ckpt="/data/run")
    trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from transformers import Trainer, TrainerCallback

from ckpt import pulse
from ckpt.adapters.transformers_run import TrainerRun, require_supported
from ckpt.repository.repository import Url
from ckpt.storage.base.errors import IntegrityError, InvalidArgument

T = TypeVar("T")

_Base: Any = Trainer if TYPE_CHECKING else object


class CheckpointedTrainer(_Base):  # type: ignore[misc]  # mypy does not look into transformers
    """Makes a subclass of Trainer save to and resume from a ckpt repository. Name it before the other base class:

        class CkptSFTTrainer(CheckpointedTrainer, SFTTrainer):
            pass

        trainer = CkptSFTTrainer(model, args=args, train_dataset=dataset, ckpt="/data/run")
        trainer.train(resume_from_checkpoint=True)

    args, kwargs: those of the other base class.
    ckpt: the URL of the repository. None means the one in CKPT_DIR, or else the folder `ckpt` in `output_dir`.

    When a step is saved follows from the TrainingArguments: save_strategy, save_steps, save_total_limit, save_only_model,
    load_best_model_at_end and metric_for_best_model. A save runs in the background. It has the model, the optimizer, the
    scheduler, the scaler, the random generators of each rank, the state of the Trainer and the position in the data. With
    save_total_limit, the best model is also saved to a repository of its own, with the suffix "-best". Of a peft model, only
    the adapters are saved.

    `train(resume_from_checkpoint=True)` continues from the newest complete step. If there is none, it continues from the
    newest folder that Trainer itself has saved in `output_dir`, or else from the beginning. A number or "checkpoint-500"
    names a step. A folder that Trainer itself has saved is loaded as Trainer does it.

    The continuation equals an uninterrupted training run bit for bit if the training itself is deterministic. Two kinds of
    randomness are not repeated: what workers of the data loader draw (`dataloader_num_workers` above 0), and what an
    IterableDataset draws in each fetch from a generator from which the model draws, too; a warning names that generator.

    Raises:
        InvalidArgument: At the definition of a class that names the other base class first; at `train`, for FSDP1,
            hyperparameter search, uploads of checkpoints to the hub, and sync_ref_model of TRL with DeepSpeed; after the first
            step, for what `ckpt.adapters.deepspeed` refuses.
        CkptError: From `train`, as for `ckpt.Checkpointer`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse an order of base classes in which the methods of Trainer would be called instead of these."""
        super().__init_subclass__(**options)
        others = cls.__mro__[: cls.__mro__.index(CheckpointedTrainer)]
        other = next((base for base in cls.__bases__ if base in others and issubclass(base, Trainer)), None)
        if Trainer in others:
            raise InvalidArgument(
                f"class {cls.__name__} would not save with ckpt, because Trainer comes first: write "
                f"class {cls.__name__}(CheckpointedTrainer, {(other or Trainer).__name__})"
            )

    def __init__(self, *args: Any, ckpt: Url | None = None, **kwargs: Any) -> None:
        self._ckpt_url = ckpt
        self._ckpt_run: TrainerRun | None = None
        super().__init__(*args, **kwargs)

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, as Trainer does; see the class for `resume_from_checkpoint`."""
        require_supported(self, args[0] if args else kwargs.get("trial"))
        with TrainerRun(self, self._ckpt_url) as run:
            train = super().train
            return self._ckpt_train(run, run.choose(resume_from_checkpoint), lambda folder: train(folder, *args, **kwargs))

    def _ckpt_train(self, run: TrainerRun, folder: str | None, train: Callable[[str | None], T]) -> T:
        """Train by a function that takes what `TrainerRun.choose` returns."""
        self._ckpt_run = run
        try:
            while True:
                try:
                    return train(folder)
                except IntegrityError as error:
                    folder = run.choose_older(error)
        finally:
            self._ckpt_run = None
            run.best.publish()

    # --- what Trainer calls ------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._ckpt_run is None:
            super()._save_checkpoint(model, trial, *args, **kwargs)
        else:
            self._ckpt_run.save()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._ckpt_run is not None:
            kwargs["resume_from_checkpoint"] = self._ckpt_run.begin_loop(kwargs.get("resume_from_checkpoint"))
        return super()._inner_training_loop(*args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        epochs, *others = super().set_initial_training_values(*args, **kwargs)
        self._ckpt_epochs = epochs
        has_ended = self._ckpt_run is not None and self._ckpt_run.has_ended(max_steps=others[-1])
        return (0 if has_ended else epochs, *others)  # with 0 epochs, Trainer runs no update

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        position = super()._init_training_state(*args, **kwargs)
        self.state.num_train_epochs = self._ckpt_epochs
        return position if self._ckpt_run is None else self._ckpt_run.position(*position)

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        if self._ckpt_run is None:
            return
        self._ckpt_run.best.update_trainer_state()
        if not self.args.restore_callback_states_from_checkpoint:
            self._ckpt_run.restore_callbacks()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not self._loads(resume_from_checkpoint):  # otherwise the model is loaded with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._ckpt_run is not None and self._loads(checkpoint):
            self._ckpt_run.load()
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._loads(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._ckpt_run is not None and self._loads(checkpoint):
            self._ckpt_run.continue_training()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        if self._ckpt_run is None or not self._ckpt_run.best.load():
            super()._load_best_model()

    def _loads(self, checkpoint: str | None) -> bool:
        return self._ckpt_run is not None and self._ckpt_run.owns(checkpoint)

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        return loader if self._ckpt_run is None else self._ckpt_run.data.wrap(loader)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        if self._ckpt_run is not None:
            epoch_iterator = self._ckpt_run.data.watch(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self._ckpt_run is not None:
            self._ckpt_run.loss = loss
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if self._ckpt_run is None:
            return super().evaluate(*args, **kwargs)
        with pulse.phase("eval"):  # longer than a step, but not a hang
            return super().evaluate(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._ckpt_run is not None:
            self._ckpt_run.note_step()


class CkptTrainer(CheckpointedTrainer, Trainer):  # type: ignore[misc]
    """Trainer of transformers that saves to and resumes from a ckpt repository; see `CheckpointedTrainer`.

        trainer = CkptTrainer(model, args, train_dataset=dataset, ckpt="/data/run")
        trainer.train(resume_from_checkpoint=True)

    Arguments and errors are those of `CheckpointedTrainer`.
    """


class Checkpoints(TrainerCallback):  # type: ignore[misc]
    """Refuses to train: a callback of Trainer can't resume, because it can't set the position in the data. Use CkptTrainer.

    url, options: as for the callbacks of this name for other frameworks. The error repeats the URL.

    Raises:
        InvalidArgument: Always, at the start of the Trainer.
    """

    def __init__(self, url: Url | None = None, **options: object) -> None:
        self._url = url

    def on_init_end(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def on_train_begin(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidArgument(
            "a callback of Trainer cannot set the position in the data, so a resumed run would repeat samples: write "
            f"ckpt.adapters.transformers.CkptTrainer(..., ckpt={self._url!r}) without this callback"
        )
