"""The callback Checkpoints, by which a Lightning Trainer saves in the background and resumes, and the plugin CkptIO.

    trainer = Trainer(callbacks=[Checkpoints("/data/run", every=100, keep=3)])
    trainer = Trainer(plugins=[CkptIO("/data/run/best")], callbacks=[ModelCheckpoint(monitor="val_loss")])

It works with the packages `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from typing import Any

from ckpt import pulse
from ckpt.adapters import lightning_packages
from ckpt.adapters.adapt.intervals import interval_from_env
from ckpt.adapters.lightning_deepspeed import is_between_updates
from ckpt.adapters.lightning_end import has_ended, note_end, require_same_model
from ckpt.adapters.lightning_epoch import is_finder
from ckpt.adapters.lightning_finetuning import freeze_parts
from ckpt.adapters.lightning_io import CkptIO as CkptIO
from ckpt.adapters.lightning_io import fabric_plugin_checks, plugin_checks
from ckpt.adapters.lightning_loops import LoopPoints, Point
from ckpt.adapters.lightning_state import TrainerState, divides_model, require_supported_strategy, sharded_model
from ckpt.checkpointer import Checkpointer
from ckpt.errors import FormatError, LeafNotFound
from ckpt.repository.repository import DIRECTORY_VARIABLE, Url
from ckpt.repository.retention import Keep
from ckpt.training.save_interval import Every


class Checkpoints:
    """A Trainer callback that saves the whole training state in the background, and resumes from the newest complete step.

        trainer = Trainer(callbacks=[Checkpoints("/data/run", every=100, keep=3)])
        trainer.fit(model, data)

    url, every, keep: as for `ckpt.Checkpointer`. A step is an optimizer step: with every=100 and `trainer.global_step` 100, the
        step with the number 99 is saved.
    check_data: whether a resumed run raises CkptError if its samplers give other samples than those of the saved run.
    options: all other arguments of `ckpt.Checkpointer`, such as tiers.

    A step has what Lightning stores (model, optimizers, schedulers, loops, callbacks, precision plugin, hooks), the random
    generators of each process, and the position in the data. It is saved between two batches or between two epochs, after
    the validation and all other callbacks. The last step of a fit is saved, too.

    `fit` resumes from the newest complete step. Where it is called with `ckpt_path`, it loads that path instead, with a warning
    if the repository has steps.

    A resumed run continues in the middle of an epoch. Dataloaders with state_dict() and load_state_dict() continue from their
    state. Others start the epoch again with the random state that it had, and the batches that were done are discarded:
    without workers only their indices are drawn, and with workers they are loaded.

    Raises:
        InvalidArgument: At the start of `fit`, for strategies other than one device, DDP, ModelParallelStrategy and
            DeepSpeedStrategy, and for what `ckpt.adapters.deepspeed` refuses. Also if a fit of another model with this URL has
            ended in this process, so that `fit` would train nothing.
        SaveFailed: An earlier save failed in the background; its error is the cause.
        FormatError: The newest step was not saved by this callback.
        CkptError: The data can't continue at the saved position.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Checkpoints:
        made: Checkpoints = object.__new__(lightning_packages.with_bases(cls, lightning_packages.callback_bases()))
        return made

    def __init__(
        self, url: Url | None = None, *, every: Every = "auto", keep: int | Keep | None = None, check_data: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._arguments = {"url": url, "every": every, "keep": keep, "check_data": check_data, **options}
        self._check_data = check_data
        self._options = {"url": url, "every": every, "keep": keep, **options}
        self._is_from_environment = False
        self._forget_fit()

    @classmethod
    def _from_environment(cls) -> Checkpoints:
        made = cls(every=interval_from_env())
        made._is_from_environment = True
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return _make, (self._arguments, self._is_from_environment)

    def _forget_fit(self) -> None:
        self._checkpointer: Checkpointer | None = None
        self._loops: LoopPoints | None = None
        self._state: TrainerState | None = None
        self._trainer: Any = None
        self._validation = ExitStack()
        self._loss: Any = None
        self._steps_seen = self._steps_saved = 0
        self._frozen: dict[str, str] = {}

    # --- hooks of the Trainer ----------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the repository. Lightning has connected all ranks before it calls this hook."""
        if stage != "fit" or trainer.fast_dev_run or _is_tuning_only(trainer):
            return
        if self._is_from_environment and not _may_use_environment(self, trainer):
            return
        require_supported_strategy(trainer.strategy)
        self._close()
        self._trainer = trainer
        self._checkpointer = Checkpointer(**{"group": None if trainer.world_size == 1 else "auto", **self._options})
        self._loops = LoopPoints(trainer, self._reached, self._restore, self._in_trials, self._check_data)
        self._state = TrainerState(trainer, self._loops.state_dict)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Freeze what was frozen at the save; only now, because the optimizers are made of what is frozen at the start."""
        freeze_parts(trainer, self._frozen)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int) -> None:
        """Remember the loss, for the decision whether a step may be saved."""
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Mark the validation, so that `ckpt-run` does not count it as a hang: it takes longer than a step."""
        if self._checkpointer is not None:
            self._validation.enter_context(pulse.phase("eval"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Mark the end of the validation."""
        self._validation.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step."""
        self._save_last()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the saves, and release the repository."""
        if stage != "fit":
            return
        if self._checkpointer is not None:
            note_end(self._checkpointer.repository.url, trainer.lightning_module)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the repository, without an error that would replace `exception`."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)
        self._close()

    def _close(self) -> None:
        checkpointer, loops = self._checkpointer, self._loops
        self._forget_fit()
        if loops is not None:
            loops.remove()
        if checkpointer is not None:
            checkpointer.close()

    def _in_trials(self) -> bool:
        """Return whether the Trainer runs trial steps: a finder takes all callbacks away for them."""
        return self not in self._trainer.callbacks

    # --- saving and restoring ----------------------------------------------------------------------------------

    def _reached(self, point: Point) -> None:
        """Save, if a save is due, at a point where the state is complete."""
        assert self._checkpointer is not None
        trainer = self._trainer
        steps = trainer.global_step
        if steps == self._steps_seen or is_between_updates(trainer.strategy):
            return
        self._steps_seen = steps
        if self._checkpointer.step(steps - 1, self._entries(), loss=self._loss) is not None:
            self._steps_saved = steps
        if point == "batch" and (0 < trainer.max_steps <= steps or (trainer.should_stop and trainer.fit_loop._can_stop_early)):
            self._save_last()  # the counters count the end of the epoch before `on_train_end`

    def _save_last(self) -> None:
        """Save the last step, if it is not saved. All ranks call this, and none saves if the loss of one is not finite."""
        if self._checkpointer is None:
            return
        # A rank whose loss is bad at a step that is due counts it as not saved, and the others count it as saved.
        if self._trainer.strategy.reduce_boolean_decision(self._steps_seen > self._steps_saved, all=True):
            self._checkpointer.save_unless_bad(self._steps_seen - 1, self._entries(), loss=self._loss)
            self._steps_saved = self._steps_seen

    def _entries(self) -> object:
        """Return what is saved: the checkpoint of Lightning, and separately a model that is sharded over the ranks."""
        if not divides_model(self._trainer.strategy):
            return self._state
        return {"trainer": self._state, "train": sharded_model(self._trainer)}

    def _load(self) -> tuple[Any, int]:
        """Return the checkpoint of the newest complete step and the number of the next; a sharded model is filled in place."""
        assert self._checkpointer is not None
        if not divides_model(self._trainer.strategy):
            return self._checkpointer.restore(None)
        try:
            entries, start = self._checkpointer.restore({"trainer": None, "train": sharded_model(self._trainer)})
        except LeafNotFound as error:
            raise FormatError(
                f"the newest step of {self._checkpointer.repository.url} was saved by another strategy: resume with that one, "
                "or give another URL"
            ) from error
        return entries["trainer"], start

    def _restore(self, path: object) -> dict[str, Any] | None:
        """Return the checkpoint of the newest complete step; None if there is none, or if `fit` loads a path."""
        assert self._checkpointer is not None
        repository = self._checkpointer.repository
        if path:
            if repository.latest() is not None:
                lightning_packages.warn(
                    f"fit loads ckpt_path={path!s}, and not the newest step of {repository.url}: leave ckpt_path out to resume"
                )
            return None
        checkpoint, start = self._load()
        if checkpoint is None:
            return None
        if not isinstance(checkpoint, dict) or "point" not in checkpoint.get("ckpt", {}):
            raise FormatError(
                f"step {start - 1} of {repository.url} was not saved by Checkpoints with this strategy: give another URL, or "
                "use ckpt.load"
            )
        if is_at_end := has_ended(checkpoint, self._trainer.fit_loop):
            require_same_model(repository.url, self._trainer.lightning_module)
        self._steps_seen = self._steps_saved = start
        self._frozen = checkpoint["ckpt"].get("frozen", {})
        lightning_packages.info(f"resumed from step {start - 1} of {repository.url}")
        if is_at_end:
            lightning_packages.info(f"this fit has ended with step {start - 1}: a larger max_epochs or max_steps continues it")
        return checkpoint


def _is_tuning_only(trainer: Any) -> bool:
    """Return whether a Tuner calls this `fit`, which ends after the trial steps."""
    return any(is_finder(each) and each._early_exit for each in trainer.callbacks)


def _make(arguments: dict[str, Any], is_from_environment: bool) -> Checkpoints:
    made = Checkpoints(**arguments)
    made._is_from_environment = is_from_environment
    return made


# --- the entry point -------------------------------------------------------------------------------------------


def callbacks_from_environment() -> list[object]:
    """Return the callbacks that Lightning gives to every Trainer: with CKPT_DIR set, one that saves there.

    Once a CkptIO was made, there is another one, which refuses strategies that would ignore it.

    CKPT_LIGHTNING=0 turns the saves off. CKPT_ADAPT_EVERY is the number of steps between two saves.
    """
    if not os.environ.get(DIRECTORY_VARIABLE) or os.environ.get(_SWITCH) == "0":
        return plugin_checks()
    return [*plugin_checks(), Checkpoints._from_environment()]


def fabric_callbacks() -> list[object]:
    """Return the callbacks that Lightning gives to every Fabric: once a CkptIO was made, one that refuses DeepSpeed."""
    return fabric_plugin_checks()


_SWITCH = "CKPT_LIGHTNING"
_trainer_of_environment: list[weakref.ref[Any]] = []
"""A weak reference to the Trainer whose fit uses CKPT_DIR: another Trainer of the process must not resume from its steps.
No lock guards it, because a process runs one fit at a time."""


def _may_use_environment(callback: Checkpoints, trainer: Any) -> bool:
    """Return whether a callback of the entry point works in this fit, and log that."""
    if any(isinstance(other, Checkpoints) and not other._is_from_environment for other in trainer.callbacks):
        return False
    if _trainer_of_environment and _trainer_of_environment[0]() is not trainer:
        lightning_packages.warn(
            f"this fit is not saved to {DIRECTORY_VARIABLE}, which another Trainer of this process uses: give this one "
            "Checkpoints(url) with a URL of its own"
        )
        return False
    _trainer_of_environment[:] = [weakref.ref(trainer)]
    lightning_packages.info(
        f"saves this fit to {os.environ[DIRECTORY_VARIABLE]} and resumes it, because {DIRECTORY_VARIABLE} is set "
        f"({_SWITCH}=0 turns this off)"
    )
    return True
