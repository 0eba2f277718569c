"""`Checkpoints`, a callback for `Model.fit` of Keras 3 that saves in the background and resumes in the middle of an epoch.

A resumed fit first reads the data up to the saved position, and does not train on it. All that it requires
of the data is the same order when the script runs again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ckpt import pulse
from ckpt.adapters import keras_fit
from ckpt.adapters.keras_fit import EpochBatches, Snapshot
from ckpt.adapters.other_callbacks import OtherCallbacks
from ckpt.adapters.running_fit import FitState
from ckpt.checkpointer import Checkpointer
from ckpt.repository.repository import Url
from ckpt.repository.retention import Keep
from ckpt.state.leaves.keras import own_variables
from ckpt.state.stateful import RandomState
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")


@dataclass
class _Position:
    """Where a training run is: a position of its data and its counters."""

    fit: int = 0
    """How many calls of `fit` with this callback have ended before."""
    epoch: int = 0
    batch: int = 0
    """The batches of the epoch that are done."""
    step: int = 0
    """The batches of all epochs and fits that are done; the number of a saved step is one less."""
    epochs: int = 0
    """The argument `epochs` of the fit."""
    ended: bool = False
    pass_epoch: int | None = None
    """The epoch at whose start `random_at_fit` was taken, if a pass over the data takes several epochs."""


@dataclass(frozen=True)
class _Resume:
    """What a fit needs of the saved step after the model has been filled."""

    position: _Position
    metrics: list[dict[str, Any]]
    callbacks: dict[str, Any]
    random: Snapshot
    random_at_fit: Snapshot
    random_at_epoch: Snapshot
    optimizer_scalars: list[tuple[Any, Any]]
    """Variables such as the learning rate, which callbacks change at the start of an epoch, with their saved values."""


class Checkpoints(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the training of a Keras model in the background, and resumes it where the newest saved step ended.

        model.fit(dataset, epochs=10, callbacks=[Checkpoints(url, every=100, keep=3)])

    url, every, keep, options: as for `ckpt.Checkpointer`. A step is a batch, counted over all epochs. The last one of a fit is
        always saved.

    A step has the model, the optimizer, the metrics, the seeds of dropout, the random generators of Python, numpy and the
    backend, the position in the epoch, the history, and what the other callbacks of the fit count, such as EarlyStopping.

    When the script runs again after a kill, `fit` restores the newest complete step, reads the data up to its position, and
    continues with the next batch. Every loss is then that of a run without a kill, provided that the data comes in the same
    order. With tensorflow, call `keras.utils.set_random_seed` before. A fit that has ended is not repeated; with more `epochs`
    it continues. Several calls of `fit` with one callback are resumed in their order.

    Raises, from `fit`:
        InvalidArgument: The callback is used outside of `Model.fit` of Keras 3, or together with BackupAndRestore; or a fit
            with another callback for this URL has ended in this process, as in a cross-validation with one URL.
        LeafMismatch: The model has other variables than the saved one.
        SaveFailed: A save failed in the background.
        CkptError: The data ends before the saved position, or the metrics are not those of the saved step.
    """

    def __init__(
        self, url: Url | None = None, *, every: Every = "auto", keep: int | Keep | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._url = url
        self._every = every
        self._options = {"every": every, "keep": keep, **options}
        self._checkpointer: Checkpointer | None = None
        self._position = _Position()
        self._fit_state = FitState(self._state, "{'model': model}")
        self._resume: _Resume | None = None
        self._has_restored = False
        self._random_at_end: Snapshot | None = None
        self._is_skipped = self._has_ended_fit = False
        self._is_first_epoch = True
        self._first_epoch = 0
        self._random_at_fit = self._random_at_epoch = Snapshot()
        self._validation = ExitStack()
        self._list: list[object] = []
        self._others = OtherCallbacks([])
        self._saves_at_epoch_begin = False
        self._expected_batch: int | None = None
        self._loss: float | None = None
        self._steps_seen = self._steps_saved_at_begin = 0

    # --- the calls of Keras ------------------------------------------------------------------------------------

    def on_train_begin(self, logs: object = None) -> None:
        """Restore the newest step, and let the fit begin at its epoch."""
        fit = keras_fit.locals_of_fit(self._model)
        iterator = fit["epoch_iterator"]
        self._list = fit["callbacks"].callbacks
        keras_fit.require_alone(self._list)
        self._others = OtherCallbacks(
            [other for other in self._list if other is not self], ("ProgbarLogger",), keras_fit.NO_STATE
        )
        self._first_epoch = int(fit["initial_epoch"])
        self._saves_at_epoch_begin, self._is_first_epoch, self._expected_batch = False, True, None
        if self._checkpointer is not None:  # an error has interrupted the previous fit
            self._has_restored = False
        else:
            self._checkpointer = Checkpointer(self._url, **self._options)
        self._position = _Position(self._position.fit, step=self._position.step, epochs=self.params["epochs"])
        self._resume, self._is_skipped = None, False
        if not self._has_restored:
            self._restore(self._checkpointer, iterator)
        keras_fit.call_before_first_epoch(fit["callbacks"], self._before_first_epoch)
        original = iterator._enumerate_iterator
        iterator._enumerate_iterator = lambda: self._batches_of_epoch(iterator, original)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Note the epoch."""
        self._model._initial_epoch = None  # otherwise Keras would begin the next fit there too
        self._position.epoch, self._position.batch = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Save the end of the previous epoch, if a save is due."""
        if self._expected_batch not in (None, batch):
            raise CkptError(
                f"fit continues with batch {batch} instead of batch {self._expected_batch} of the saved step: "
                "give it the data that it had then"
            )
        self._expected_batch = None
        if self._saves_at_epoch_begin:  # only now, because at the end of an epoch other callbacks change the model
            self._saves_at_epoch_begin = False
            self._save_if_due()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the step if a save is due."""
        self._position.step += batch + 1 - self._position.batch
        self._position.batch = batch + 1
        self._loss = (logs or {}).get("loss")
        if batch + 1 == self.params["steps"]:
            self._saves_at_epoch_begin = True
        else:
            self._save_if_due()

    def on_test_begin(self, logs: object = None) -> None:
        """Mark the validation, so that `ckpt-run` does not count it as a hang: it takes longer than a step."""
        self._validation.enter_context(pulse.phase("eval"))

    def on_test_end(self, logs: object = None) -> None:
        """Mark the end of the validation."""
        self._validation.close()

    def on_train_end(self, logs: object = None) -> None:
        """Save the last step, and wait until it is committed."""
        self._model._initial_epoch = None
        if self._checkpointer is None:
            return
        if not self._is_skipped and self._position.step > self._steps_saved_at_begin:
            if self._position.batch:
                self._position.epoch, self._position.batch = self._position.epoch + 1, 0
                self._random_at_epoch = Snapshot.taken()  # with more epochs, the next one begins here
            self._position.ended = True
            self._checkpointer.save_unless_bad(self._position.step - 1, self._fit_state, loss=self._loss)
        self._position.fit += 1
        _urls_of_ended_fits.add(self._checkpointer.repository.url)
        self._has_ended_fit = True
        checkpointer, self._checkpointer = self._checkpointer, None
        checkpointer.close()
        if self._random_at_end is not None:  # the code after a skipped fit draws the same random numbers as in the first run
            self._random_at_end.set()
            self._random_at_end = None

    # --- saving ------------------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        assert self._checkpointer is not None
        done, before = self._position.step, self._steps_seen
        self._steps_seen = done
        if isinstance(self._every, int) and done % self._every and done // self._every > before // self._every:
            # One execution of several steps has passed the due one.
            self._checkpointer.save_unless_bad(done - 1, self._fit_state, loss=self._loss)
        else:
            self._checkpointer.step(done - 1, self._fit_state, loss=self._loss)

    def _state(self) -> dict[str, Any]:
        model = self.model  # with jax, this moves the arrays back into the variables
        return {
            "fit": dict(vars(self._position)),
            "model": model,
            "metrics": [own_variables(metric, metric.variables) for metric in model.metrics],
            "callbacks": self._others.changed(),
            "random": RandomState(),
            "random_at_fit": self._random_at_fit,
            "random_at_epoch": self._random_at_epoch,
        }

    # --- resuming ----------------------------------------------------------------------------------------------

    def _restore(self, checkpointer: Checkpointer, iterator: Any) -> None:
        """Fill the model from the newest complete step, and set where the fit begins."""
        self._steps_saved_at_begin = 0
        found, next_step = checkpointer.restore({"fit": None})
        if not next_step:
            self._has_restored = True
            return
        if found["fit"]["fit"] > self._position.fit:  # a later fit was saved, perhaps of a model that was compiled again
            self._require_first_of_process(checkpointer)
            self._is_skipped, self._model._initial_epoch = True, self.params["epochs"]
            return
        self._has_restored = True
        keras_fit.build_from_data(self._model, iterator)
        resume = self._filled(checkpointer)
        saved, epochs = resume.position, self.params["epochs"]
        self._steps_saved_at_begin = self._steps_seen = saved.step
        if (saved.ended and saved.epochs == epochs) or saved.epoch >= epochs:
            self._require_first_of_process(checkpointer)
            log.info("this fit has ended with step %d", saved.step - 1)
            self._model._initial_epoch = epochs
            self._others.note_begin()
            self._others.restore(resume.callbacks)
            self._position.step = saved.step
            self._random_at_end = resume.random
        else:
            log.info("fit continues after step %d, in epoch %d with batch %d", saved.step - 1, saved.epoch, saved.batch)
            self._model._initial_epoch, self._resume = saved.epoch, resume

    def _require_first_of_process(self, checkpointer: Checkpointer) -> None:
        """Raise InvalidArgument if a fit would be skipped because another callback has ended one in this process."""
        url = checkpointer.repository.url
        if url in _urls_of_ended_fits and not self._has_ended_fit:
            self._checkpointer = None
            checkpointer.close()
            raise InvalidArgument(
                f"a fit with another Checkpoints({url!r}) has ended in this process, so this one would be skipped: give each "
                "model its own URL, or one Checkpoints to all fits of a model"
            )

    def _filled(self, checkpointer: Checkpointer) -> _Resume:
        model = self._model
        snapshots = Snapshot(), Snapshot(), Snapshot()
        like = dict(zip(("random", "random_at_fit", "random_at_epoch"), snapshots, strict=True))
        state, _ = checkpointer.restore({"fit": None, "model": model, "metrics": None, "callbacks": None, **like})
        position = _Position(**state["fit"])
        optimizer = getattr(model, "optimizer", None)
        scalars = [variable for variable in getattr(optimizer, "variables", []) if tuple(variable.shape) == ()]
        values = [(variable, np.array(keras.ops.convert_to_numpy(variable))) for variable in scalars]
        return _Resume(position, state["metrics"], state["callbacks"], *snapshots, values)

    def _before_first_epoch(self) -> None:
        """Note what the other callbacks have set; give them what they had counted, which their `on_epoch_begin` may read."""
        self._others.note_begin()
        if self._resume is not None:
            self._restore_callbacks(self._resume)

    def _restore_callbacks(self, resume: _Resume) -> None:
        for variable, value in resume.optimizer_scalars:
            variable.assign(value)
        self._others.restore(copy.deepcopy(resume.callbacks))

    def _batches_of_epoch(self, iterator: Any, original: Callable[[], EpochBatches]) -> EpochBatches:
        """Yield the batches of an epoch as Keras does; of the resumed epoch, only those that are not done."""
        if self._is_first_epoch:
            self._is_first_epoch = False
            keras_fit.move_to_end(self._list, self)  # so that a save has what the others count in the same batch
            keras_fit.warn_of_random_order(iterator)
            self._random_at_fit = Snapshot.taken()
        resume, self._resume = self._resume, None
        if resume is None:
            self._random_at_epoch = Snapshot.taken()
            if keras_fit.begins_pass(iterator):
                self._random_at_fit, self._position.pass_epoch = self._random_at_epoch, self._position.epoch
            yield from original()
            return
        saved, batch, read = resume.position, None, 0
        batches = self._position_data(resume, iterator, original)
        for begin, end, data in batches:
            if begin >= saved.batch:
                self._continue(resume, batch)
                yield begin, end, data
                yield from batches
                return
            batch, read = keras_fit.read_batches(data, end - begin + 1), end + 1
        keras_fit.require_position(read, saved.batch)
        self._continue(resume, batch)

    def _position_data(self, resume: _Resume, iterator: Any, original: Callable[[], EpochBatches]) -> EpochBatches:
        """Return the batches of the resumed epoch, in the order that they had when the step was saved."""
        self._random_at_fit, self._random_at_epoch = resume.random_at_fit, resume.random_at_epoch
        if not keras_fit.order_follows_global_generators(iterator):
            saved = resume.position
            pass_epoch = self._first_epoch if saved.pass_epoch is None else saved.pass_epoch
            for epoch in range(self._first_epoch, saved.epoch):
                if epoch == pass_epoch:
                    resume.random_at_fit.set()
                keras_fit.read_epoch(iterator, original)
            if keras_fit.begins_pass(iterator):
                self._random_at_fit, saved.pass_epoch = resume.random_at_epoch, saved.epoch
        resume.random_at_epoch.set()
        return original()

    def _continue(self, resume: _Resume, batch: object) -> None:
        """Restore what Keras and other callbacks have reset since the model was filled.

        batch: the last batch that was read, None at the start of an epoch.
        """
        if batch is not None:
            self._restore_metrics(self._model.metrics, resume.metrics)
        if not resume.position.ended:  # else the step was saved before the `on_epoch_begin` of this epoch
            self._restore_callbacks(resume)
        self._position = copy.copy(resume.position)
        self._position.epochs, self._position.ended = self.params["epochs"], False
        self._expected_batch = self._position.batch
        if batch is not None:  # else the first batch of the epoch, which draws from the generators, is not read yet
            resume.random.set()

    def _restore_metrics(self, metrics: list[Any], saved: list[dict[str, Any]]) -> None:
        current = [own_variables(metric, metric.variables) for metric in metrics]
        if [sorted(variables) for variables in current] != [sorted(arrays) for arrays in saved]:
            raise CkptError(
                "the metrics are not those of the saved step: compile the model as it was, or begin with another URL"
            )
        for variables, arrays in zip(current, saved, strict=True):
            for name, variable in variables.items():
                variable.assign(arrays[name])


_urls_of_ended_fits: set[str] = set()
"""The repositories of the fits that have ended in this process. No lock guards it, because URLs are only added."""
