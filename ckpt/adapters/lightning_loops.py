"""Where a Lightning Trainer can be saved and resumed exactly: between two batches, and between two epochs.

Callback hooks run in the middle of the work for a batch: a validation, learning rate schedulers and counters follow them. So
this module calls back after the loops' own `on_advance_end`. At the first batch of a resumed run it sets all counters to the
saved ones, so that Lightning repeats neither a validation nor a step of a scheduler.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

from ckpt.adapters import lightning_packages
from ckpt.adapters.epoch_random import PERSISTENT_WORKERS
from ckpt.adapters.lightning_averaging import same_learning_rates
from ckpt.adapters.lightning_data import FetcherPosition, loader_states_ahead, set_random_snapshot
from ckpt.adapters.lightning_end import limits, was_stopped_early
from ckpt.adapters.lightning_epoch import repeated_epoch_start

Point = Literal["batch", "epoch"]
"""Where a state was saved: after a batch in the middle of an epoch, or after an epoch."""


class LoopPoints:
    """Calls `reached` after each batch and each epoch of a Trainer, and resumes its loops from such a point.

    trainer: the Trainer, in its setup hook.
    reached: is called with "batch" in the middle of an epoch, and with "epoch" between two epochs.
    restore: returns the checkpoint to resume from, or None. It is called when the Trainer would load one.
    in_trials: returns whether a Tuner or a finder runs trial steps, which are not steps of the training.
    check_data: the argument `check` of `FetcherPosition`.
    """

    def __init__(
        self,
        trainer: Any,
        reached: Callable[[Point], None],
        restore: Callable[[object], dict[str, Any] | None],
        in_trials: Callable[[], bool],
        check_data: bool,
    ) -> None:
        self._trainer, self._reached, self._restore, self._in_trials = trainer, reached, restore, in_trials
        self.point: Point = "epoch"
        self._position = FetcherPosition(check_data)
        self._resume_at: dict[str, Any] | None = None
        self._fit_loop_state: dict[str, Any] = {}
        self._callback_states: dict[str, Any] = {}
        self._checkpoint: dict[str, Any] | None = None
        """The checkpoint to resume from, until the Trainer has loaded all of it."""
        self._ends_trials = False  # whether a finder loads the checkpoint that it made before its trial steps
        self._is_stopped_early = False
        self._limits = limits(trainer.fit_loop)
        self._trial_fetcher: Any = None
        connector, fit, epoch = trainer._checkpoint_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._wrapped: list[tuple[object, str, Callable[..., None]]] = [
            (connector, "resume_start", self._resume_start),
            (connector, "restore", self._restore_after_trials),
            (connector, "restore_training_state", self._restore_training_state),
            (fit, "setup_data", self._setup_data),
            (fit, "on_advance_start", self._epoch_starts),
            (fit, "on_advance_end", self._epoch_ends),
            (epoch, "reset", self._reset_batches),
            (epoch, "on_run_start", self._batches_start),
            (epoch, "on_advance_end", self._batch_ends),
        ]
        check = "_run_early_stopping_check"
        self._wrapped += [(each, check, self._check_early_stopping) for each in trainer.callbacks if hasattr(each, check)]
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, partial(self._call, wrapper, getattr(owner, name)))

    def _call(self, wrapper: Callable[..., None], original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call a method of the Trainer by its wrapper; in trial steps, the method alone."""
        if self._in_trials():
            original(*args, **kwargs)
            self._trial_fetcher = self._trainer.fit_loop._data_fetcher
        else:
            wrapper(original, *args, **kwargs)

    def remove(self) -> None:
        """Give the loops their own methods again."""
        for owner, name, _ in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []

    def state_dict(self) -> dict[str, Any]:
        """Return the point, the position in the data, and whether EarlyStopping has ended the training."""
        fit = self._trainer.fit_loop
        is_stopped_early = self._is_stopped_early and self._trainer.should_stop and fit._can_stop_early
        found = {"point": self.point, "end": {"stopped_early": is_stopped_early, "limits": self._limits}}
        if self._trainer.reload_dataloaders_every_n_epochs:
            found["loader_epoch"] = fit._last_train_dl_reload_epoch
        if fit._data_fetcher is not None:  # otherwise the training has ended, or not begun
            found["data"] = self._position.state_dict(fit._data_fetcher, self.point == "batch")
        return found

    # --- wrappers of the Trainer's methods ---------------------------------------------------------------------

    def _resume_start(self, original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if self._ends_trials:
            return
        path = args[0] if args else kwargs.get("checkpoint_path")
        checkpoint = self._restore(path)
        if checkpoint is not None:
            if was_stopped_early(checkpoint, self._trainer.fit_loop):
                self._trainer.should_stop = True
            self._resume_at = checkpoint.pop("ckpt")
            self._fit_loop_state = checkpoint["loops"]["fit_loop"]
            self._callback_states = checkpoint.get("callbacks", {})
            if states := loader_states_ahead(self._resume_at.get("data", {})):
                self._fit_loop_state["state_dict"]["combined_loader"] = states
            self._trainer._checkpoint_connector._loaded_checkpoint = self._checkpoint = checkpoint

    def _check_early_stopping(self, original: Callable[[Any], None], trainer: Any) -> None:
        """Note whether this callback stops the training. A stop by other code may be a pause, which a restart continues."""
        before = trainer.should_stop
        original(trainer)
        self._is_stopped_early = self._is_stopped_early or (trainer.should_stop and not before)

    def _restore_after_trials(self, original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Let a finder load the checkpoint that it has made before its trial steps."""
        self._ends_trials = True
        try:
            original(*args, **kwargs)
        finally:
            self._ends_trials = False

    def _restore_training_state(self, original: Callable[[], None]) -> None:
        if self._checkpoint is not None and not self._ends_trials:
            connector = self._trainer._checkpoint_connector
            if not connector._loaded_checkpoint:  # a finder has loaded its own checkpoint meanwhile
                connector._loaded_checkpoint = self._checkpoint
                self._trainer.fit_loop._combined_loader = None  # its loader has no state of the resumed run
            self._checkpoint = None
        original()

    def _setup_data(self, original: Callable[[], None]) -> None:
        fit = self._trainer.fit_loop
        if self._resume_at is not None:
            fit._restarting = True  # otherwise Lightning does not load the state of dataloaders between epochs
        before = fit._data_fetcher
        if before is not None and before is self._trial_fetcher:  # older versions of Lightning continue after the trial batches
            fit._combined_loader = None
        with _call_before_iterator(type(fit), self._iterator_begins), self._epoch_of_loader():
            original()
        if self._resume_at is not None and self._resume_at["point"] == "epoch" and fit._data_fetcher is not before:
            _clear_restart(fit)

    @contextmanager
    def _epoch_of_loader(self) -> Iterator[None]:
        """Let the user make the dataloader of a resumed run in the epoch in which the saved run has made it."""
        progress = self._trainer.fit_loop.epoch_progress.current
        epoch = progress.completed
        if self._resume_at is not None and not self._is_reload_due():
            progress.completed = self._resume_at.get("loader_epoch", epoch)
        try:
            yield
        finally:
            progress.completed = epoch

    def _is_reload_due(self) -> bool:
        """Return whether the saved run would make another dataloader at the start of the epoch."""
        if self._resume_at is None or self._resume_at["point"] == "batch" or "loader_epoch" not in self._resume_at:
            return False
        epochs = self._trainer.reload_dataloaders_every_n_epochs
        return bool(epochs) and self._trainer.current_epoch - self._resume_at["loader_epoch"] >= epochs

    def _iterator_begins(self, combined_loader: Any) -> None:
        if self._resume_at is not None:
            self._position.iterator_resumes(combined_loader, self._resume_at.get("data", {}))
        self._position.iterator_begins(combined_loader)

    def _epoch_starts(self, original: Callable[[], None]) -> None:
        resume_at = self._resume_at
        if resume_at is not None and resume_at["point"] == "batch":
            with repeated_epoch_start(self._trainer, self._callback_states):
                _clear_stage(self._trainer.fit_loop)  # otherwise newer versions of Lightning do not call the hooks
                original()
            return
        if resume_at is not None:
            fit, is_reload_due = self._trainer.fit_loop, self._is_reload_due()
            self._resume_at = None
            self._set_counters()
            if "data" in resume_at:
                set_random_snapshot(None if is_reload_due else fit._combined_loader, resume_at["data"]["now"])
            if is_reload_due:
                fit._combined_loader = None
        with nullcontext() if resume_at is None else same_learning_rates(self._trainer):
            original()

    def _reset_batches(self, original: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            if self._resume_at is not None:  # Lightning does not know that the data continues
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            original()

    def _batches_start(self, original: Callable[[Any], None], fetcher: Any) -> None:
        resume_at, self._resume_at = self._resume_at, None
        if resume_at is None:
            with _call_before_iterator(type(self._trainer.fit_loop), self._position.iterator_begins):
                original(fetcher)
            self._position.epoch_begins(fetcher)
            return
        original(fetcher)
        self._set_counters()
        self._position.go_to(fetcher, resume_at["data"])

    def _batch_ends(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        epoch = self._trainer.fit_loop.epoch_loop
        if not epoch._num_ready_batches_reached() and not epoch._should_accumulate():
            self.point = "batch"
            self._reached("batch")
        self._position.before_fetch(fetcher)

    def _epoch_ends(self, original: Callable[[], None]) -> None:
        original()
        if self._trainer.fit_loop.epoch_loop._num_ready_batches_reached():  # otherwise max_steps ended it before its end
            self.point = "epoch"
            self._reached("epoch")

    def _set_counters(self) -> None:
        """Set all counters of the loops to the saved values: Lightning's own restart changes some of them."""
        fit = self._trainer.fit_loop
        fit.load_state_dict(self._fit_loop_state)
        fit._combined_loader_states_to_load = []
        self._fit_loop_state = {}
        _clear_restart(fit)
        loaders = [] if fit._combined_loader is None else fit._combined_loader.flattened
        if self._trainer.current_epoch and any(getattr(loader, "persistent_workers", False) for loader in loaders):
            lightning_packages.warn(PERSISTENT_WORKERS.format(option="persistent_workers=False"))


def _clear_restart(loop: Any) -> None:
    """Remove the marks with which Lightning would repeat the last part of the saved batch or epoch."""
    for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
        if hasattr(loop, name):
            setattr(loop, name, False)
    _clear_stage(loop)
    for child in list(vars(loop).values()):
        if hasattr(child, "on_save_checkpoint") and hasattr(child, "_restarting"):
            _clear_restart(child)


def _clear_stage(loop: Any) -> None:
    if hasattr(loop, "reset_restart_stage"):
        loop.reset_restart_stage()


@contextmanager
def _call_before_iterator(fit_loop: type, call: Callable[[Any], None]) -> Iterator[None]:
    """Call `call` with each CombinedLoader of which the block makes iterators, before it does."""
    kind = next(sys.modules[base.__module__].CombinedLoader for base in fit_loop.__mro__ if _has_combined_loader(base))
    original = kind.__iter__

    def begin(combined_loader: Any) -> Any:
        call(combined_loader)
        return original(combined_loader)

    kind.__iter__ = begin
    try:
        yield
    finally:
        kind.__iter__ = original


def _has_combined_loader(base: type) -> bool:
    return hasattr(sys.modules[base.__module__], "CombinedLoader")
