"""The callback Checkpoints, with which a Lightning Trainer saves in the background and resumes by itself.

    trainer = Trainer(callbacks=[Checkpoints("/data/run", every=100, keep=3)])

It works with the packages `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from typing import Any

from ckpt.adapters.lightning_loops import LoopPoints, Point
from ckpt.adapters.lightning_state import TrainerState, require_supported_strategy
from ckpt.checkpointer import Checkpointer
from ckpt.errors import FormatError
from ckpt.repository.repository import Url
from ckpt.repository.retention import Keep
from ckpt.storage.base.errors import CkptError
from ckpt.training.save_interval import Every

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class Checkpoints:
    """A Trainer callback that saves the whole training state in the background, and resumes from the newest whole step.

        trainer = Trainer(callbacks=[Checkpoints("/data/run", every=100, keep=3)])
        trainer.fit(model, data)

    url, every, keep: as for `ckpt.Checkpointer`. A step is an optimizer step: with every=100 and `trainer.global_step` 100, the
        step with the number 99 is saved.
    check_data: whether a resumed run raises CkptError if its samplers give other samples than those of the saved run.
    options: all other arguments of `ckpt.Checkpointer`, such as tiers.

    A step has what Lightning stores (model, optimizers, schedulers, loops, callbacks, precision plugin, hooks), the random
    generators of each process, and the position in the data. It is saved between two batches or between two epochs, after
    the validation and all other callbacks. The last step of a fit is saved, too.

    `fit` resumes from the newest whole step. Where it is called with `ckpt_path`, it loads that path instead, with a warning if
    the repository has steps.

    A resumed run continues in the middle of an epoch. Dataloaders with state_dict() and load_state_dict() continue from their
    state. Others start the epoch again with the random state that it had, and the batches that were done are discarded:
    without workers only their indices are drawn, and with workers they are loaded.

    Raises:
        InvalidArgument: At the start of `fit`, if the strategy keeps only parts of the model on each rank.
        SaveFailed: An earlier save failed in the background; its error is the cause.
        FormatError: The newest step was not saved by this callback.
        CkptError: The data can't continue at the saved position.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Checkpoints:
        return object.__new__(type(cls.__name__, (cls, *_base_classes()), {"__module__": cls.__module__}))

    def __init__(
        self, url: Url | None = None, *, every: Every = "auto", keep: int | Keep | None = None, check_data: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._arguments = {"url": url, "every": every, "keep": keep, "check_data": check_data, **options}
        self._check_data = check_data
        self._options = {"url": url, "every": every, "keep": keep, **options}
        self._forget_fit()

    def __reduce__(self) -> Any:
        return _make, (self._arguments,)

    def _forget_fit(self) -> None:
        self._checkpointer: Checkpointer | None = None
        self._loops: LoopPoints | None = None
        self._state: TrainerState | None = None
        self._trainer: Any = None
        self._loss: Any = None
        self._steps_seen = self._steps_saved = 0

    # --- hooks of the Trainer ----------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the repository; all ranks have met before this hook."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        require_supported_strategy(trainer.strategy)
        self._close()
        self._trainer = trainer
        self._checkpointer = Checkpointer(**{"group": None if trainer.world_size == 1 else "auto", **self._options})
        self._loops = LoopPoints(trainer, self._reached, self._restore, self._check_data)
        self._state = TrainerState(trainer, self._loops.state_dict)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Remember the loss, for the decision whether a step may be saved."""
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step."""
        if self._steps_seen > self._steps_saved:
            self._save_last()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the saves, and release the repository."""
        if stage == "fit":
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

    # --- saving and restoring ----------------------------------------------------------------------------------

    def _reached(self, point: Point) -> None:
        """Save, if a save is due, at a point where the state is complete."""
        assert self._checkpointer is not None
        trainer = self._trainer
        steps = trainer.global_step
        if steps == self._steps_seen:
            return
        self._steps_seen = steps
        if self._checkpointer.step(steps - 1, self._state, loss=self._loss) is not None:
            self._steps_saved = steps
        elif point == "batch" and (
            0 < trainer.max_steps <= steps or (trainer.should_stop and trainer.fit_loop._can_stop_early)
        ):
            self._save_last()  # the counters count the end of the epoch before `on_train_end`

    def _save_last(self) -> None:
        if self._checkpointer is not None and (self._loss is None or math.isfinite(self._loss)):
            self._checkpointer.save(self._steps_seen - 1, self._state)
            self._steps_saved = self._steps_seen

    def _restore(self, path: Any) -> dict[str, Any] | None:
        """Return the checkpoint of the newest whole step; None if there is none, or if `fit` loads a path."""
        assert self._checkpointer is not None
        repository = self._checkpointer.repository
        if path:
            if repository.latest() is not None:
                _warn(
                    f"fit loads ckpt_path={path!s}, and not the newest step of {repository.url}: leave ckpt_path out to resume"
                )
            return None
        checkpoint, start = self._checkpointer.restore(None)
        if checkpoint is None:
            return None
        if not isinstance(checkpoint, dict) or "point" not in checkpoint.get("ckpt", {}):
            raise FormatError(
                f"step {start - 1} of {repository.url} was not saved by Checkpoints: give another URL, or use ckpt.load"
            )
        self._steps_seen = self._steps_saved = start
        _info(f"resumed from step {start - 1} of {repository.url}")
        return checkpoint


def _make(arguments: dict[str, Any]) -> Checkpoints:
    return Checkpoints(**arguments)


# --- the two packages of Lightning -----------------------------------------------------------------------------


def _packages() -> list[str]:
    """Return the package of Lightning that this process has imported, or both; otherwise an installed one."""
    if imported := [name for name in _PACKAGES if name in sys.modules]:
        return imported
    for name in _PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return [name]
    raise CkptError("Lightning is not installed: pip install lightning")


def _base_classes() -> list[type]:
    """Return the base class of checkpoint callbacks, which Lightning runs after all others."""
    return [importlib.import_module(f"{name}.callbacks").Checkpoint for name in _packages()]


def _info(message: str) -> None:
    _rank_zero("rank_zero_info", message)


def _warn(message: str) -> None:
    _rank_zero("rank_zero_warn", message)


def _rank_zero(function: str, message: str) -> None:
    """Log a message on rank 0, where Lightning's own messages appear."""
    getattr(importlib.import_module(f"{_packages()[0]}.utilities.rank_zero"), function)(f"ckpt: {message}")
