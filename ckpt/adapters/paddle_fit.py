"""`Checkpoints`, a callback for `paddle.Model.fit` that saves in the background and resumes in the middle of an epoch.

Paddle gives callbacks neither the data nor the other callbacks, and no callback can choose the first epoch. So the callback
wraps two methods of the running model and one of its list of callbacks, until the fit ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import paddle

from ckpt import pulse
from ckpt.adapters.epoch_random import RandomSnapshot
from ckpt.adapters.other_callbacks import OtherCallbacks
from ckpt.adapters.running_fit import FitState, caller_locals
from ckpt.checkpointer import Checkpointer
from ckpt.errors import InvalidArgument
from ckpt.repository.repository import Url
from ckpt.repository.retention import Keep
from ckpt.state.leaves.paddle_objects import set_random_state
from ckpt.storage.base.errors import CkptError
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

_WITHOUT_STATE = ("ProgBarLogger", "ModelCheckpoint", "VisualDL", "WandbCallback")


@dataclass
class _Position:
    """Where a fit is."""

    epoch: int = 0
    batch: int = 0
    """The batches of the epoch that are done."""
    step: int = 0
    """The batches of all epochs that are done; the number of a saved step is one less."""
    epochs: int = 0
    """The argument `epochs` of the fit."""
    ended: bool = False
    sampler_epoch: int | None = None
    """The number from which a DistributedBatchSampler shuffles the epoch."""
    num_iters: int | None = None
    """The argument `num_iters` of the fit."""
    num_iters_left: int | None = None
    """How many of them were left at the start of the epoch. Paddle counts the batches of evaluations, too."""
    losses: list[float] | None = None
    """The losses of the last batch, where the data has no length: then it may be the last one of its epoch."""


class Checkpoints(paddle.callbacks.Callback):  # type: ignore[misc]  # mypy does not look into paddle
    """Saves the fit of a paddle.Model in the background, and resumes it where the newest saved step ended.

        model.fit(dataset, epochs=10, batch_size=64, callbacks=[Checkpoints(url, every=100, keep=3)])

    url, every, keep, options: as for `ckpt.Checkpointer`. A step is a batch, counted over all epochs. With
        `accumulate_grad_batches`, a step is saved after an update of the optimizer. The last one of a fit is always saved.

    A step has the network, the optimizer with its schedule, the gradient scaler, the metrics, the random generators, the
    position in the epoch, and what other callbacks count, such as EarlyStopping.

    When the script runs again after a kill, `fit` restores the newest complete step, reads the batches of the epoch that are
    done without training on them, and continues with the next one. Every loss is then that of a run without a kill. A fit that
    has ended is not repeated; with more epochs it continues. Each fit of a script needs a URL of its own.

    Raises, from `fit`:
        InvalidArgument: Paddle is in static mode; or a fit with this URL has ended in this process.
        CkptError: The data ends before the saved position.
        LeafMismatch: The network or the optimizer has other parameters than the saved one.
        SaveFailed: A save failed in the background.
    """

    def __init__(
        self, url: Url | None = None, *, every: Every = "auto", keep: int | Keep | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._url = url
        self._options = {"every": every, "keep": keep, **options}
        self._checkpointer: Checkpointer | None = None
        self._position = _Position()
        self._fit_state = FitState(self._state, "{'net': net}")
        self._resume: dict[str, Any] | None = None
        self._first_epoch = self._epoch = self._steps_saved = 0
        self._is_skipping = self._saves_at_epoch_begin = False
        self._is_ended_by_num_iters = False
        self._read_again = 0
        self._batches: int | None = None
        self._loss: float | None = None
        self._random_at_epoch = RandomSnapshot()
        self._random_at_end: RandomSnapshot | None = None
        self._others = self._metrics = OtherCallbacks([])
        self._sampler: Any = None
        self._callbacks: Any = None
        self._evaluation = ExitStack()

    # --- the calls of Paddle -----------------------------------------------------------------------------------

    def on_train_begin(self, logs: object = None) -> None:
        """Restore the newest step, and let the fit begin at its epoch."""
        if not paddle.in_dynamic_mode():
            raise InvalidArgument("Checkpoints needs the dynamic mode of Paddle: remove paddle.enable_static()")
        fit = _locals_of_fit(self.model)
        if self._checkpointer is not None:  # an error of another callback has ended the previous fit
            self._close(None)
        self._callbacks, loader = fit["cbks"], fit["train_loader"]
        self._checkpointer = Checkpointer(self._url, **self._options)
        if (url := self._checkpointer.repository.url) in _urls_of_ended_fits:
            self._close(None)
            raise InvalidArgument(
                f"a fit with Checkpoints({url!r}) has ended in this process, and this one would count as its repetition: give "
                "each fit a URL of its own"
            )
        others = [each for each in self._callbacks.callbacks if each is not self]
        self._callbacks.callbacks = [*others, self]  # so that a save has what the others count in the same batch
        self._others, self._metrics = OtherCallbacks(others, _WITHOUT_STATE), OtherCallbacks(self.model._metrics)
        self._sampler = getattr(loader, "batch_sampler", None)
        self._random_at_epoch = RandomSnapshot()
        self._random_at_epoch.loaders = (loader,)
        self._batches = self.model._len_data_loader(loader)
        self._position = _Position(epochs=int(fit["epochs"]), num_iters=self._num_iters_left())
        self._first_epoch, self._epoch, self._resume = 0, -1, None
        self._saves_at_epoch_begin, self._steps_saved, self._random_at_end = False, 0, None
        self._read_again, self._is_ended_by_num_iters = 0, False
        self._restore(self._checkpointer)
        self._wrap()

    def on_train_batch_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        """Save the step if a save is due."""
        position = self._position
        position.step += step + 1 - position.batch
        position.batch = step + 1
        loss = (logs or {}).get("loss")
        losses = [float(each) for each in loss] if isinstance(loss, (list, tuple)) else []
        self._loss = losses[0] if losses else None
        position.losses = losses if self._batches is None else None
        if step + 1 == self._batches:
            self._saves_at_epoch_begin = True  # an evaluation and other callbacks follow
        elif (step + 1) % self.model._accumulate == 0:
            self._save_if_due()

    def on_eval_begin(self, logs: object = None) -> None:
        """Mark the evaluation, so that `ckpt-run` does not count it as a hang: it takes longer than a step."""
        self._evaluation.enter_context(pulse.phase("eval"))

    def on_eval_end(self, logs: object = None) -> None:
        """Mark the end of the evaluation."""
        self._evaluation.close()

    def on_train_end(self, logs: object = None) -> None:
        """Save the last step, and wait until it is committed."""
        checkpointer, position = self._checkpointer, self._position
        if checkpointer is None:
            return
        if position.step > self._steps_saved:
            position.ended = True
            has_read_all = not self._is_ended_by_num_iters if self._batches is None else position.batch == self._batches
            if has_read_all:  # otherwise num_iters has ended the fit
                position.epoch, position.batch = position.epoch + 1, 0
                self._note_epoch_begin()
            checkpointer.save_unless_bad(position.step - 1, self._fit_state, loss=self._loss)
        _urls_of_ended_fits.add(checkpointer.repository.url)
        self._close(None)
        if self._random_at_end is not None:  # the code after a skipped fit draws the same random numbers as in the first run
            self._random_at_end.apply()

    # --- the methods that are wrapped during a fit -------------------------------------------------------------

    def _wrap(self) -> None:
        model: Any = self.model
        callbacks = self._callbacks
        run, train, call = model._run_one_epoch, model.train_batch, callbacks._call

        def run_one_epoch(loader: Any, callbacks: Any, mode: str, *others: Any, **named: Any) -> Any:
            if self._epoch < self._first_epoch:
                return {}
            try:
                if mode == "train":
                    self._begin_epoch()
                limit = self._num_iters_left()
                logs = run(loader, callbacks, mode, *others, **named)
                if mode == "train":
                    self._is_ended_by_num_iters = limit is not None and self._num_iters_left() is None
                    if self._resume is not None:
                        self._continue_at_end(self._resume, logs)
            except BaseException as error:
                self._close(error)
                raise
            return logs

        def train_batch(*arguments: Any, **named: Any) -> Any:
            if not self._is_skipping:
                return train(*arguments, **named)
            return ([0.0], []) if model._metrics and model._loss else [0.0]

        def call_callbacks(name: str, *arguments: Any) -> None:
            if name == "on_epoch_begin":
                self._epoch = int(arguments[0])
                if self._epoch == self._first_epoch:
                    self._before_first_epoch()
            if name == "on_train_end" or (self._epoch >= self._first_epoch and not self._skips(name, *arguments)):
                call(name, *arguments)

        vars(model).update(_run_one_epoch=run_one_epoch, train_batch=train_batch)
        vars(callbacks)["_call"] = call_callbacks

    def _skips(self, name: str, *arguments: Any) -> bool:
        """Return whether a call of the callbacks belongs to a batch that was done before the restart."""
        if self._resume is None or not name.startswith("on_train_batch"):
            return False
        self._is_skipping = arguments[0] < self._position.batch
        if self._is_skipping:
            self._read_again = arguments[0] + 1
        else:
            self._continue(self._resume)
        return self._is_skipping

    def _close(self, error: BaseException | None) -> None:
        """Wait until the last save is committed, and leave the model as it was."""
        model: Any = self.model
        for name in ("_run_one_epoch", "train_batch"):
            vars(model).pop(name, None)
        vars(self._callbacks).pop("_call", None)
        self._is_skipping = False
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    # --- saving ------------------------------------------------------------------------------------------------

    def _before_first_epoch(self) -> None:
        """Note what the other callbacks have set; give them what they had counted, which their `on_epoch_begin` may read."""
        self._others.note_begin()
        if self._resume is not None:
            self._others.restore(deepcopy(self._resume["callbacks"]))

    def _begin_epoch(self) -> None:
        """Save the end of the previous epoch, if a save is due; set the order of the epoch if it is resumed."""
        if self._resume is not None:
            if self._position.sampler_epoch is not None and self._sampler is not None:
                self._sampler.epoch = self._position.sampler_epoch
            self._random_at_epoch.apply()
            self._metrics.restore(self._resume["metrics"])
            return
        self._position.epoch, self._position.batch = self._epoch, 0
        self._note_epoch_begin()
        if self._saves_at_epoch_begin:
            self._saves_at_epoch_begin = False
            self._save_if_due()

    def _note_epoch_begin(self) -> None:
        epoch = getattr(self._sampler, "epoch", None)
        self._position.sampler_epoch = epoch if isinstance(epoch, int) else None
        self._position.num_iters_left = self._num_iters_left()
        self._random_at_epoch.take()

    def _num_iters_left(self) -> int | None:
        left = getattr(self.model, "num_iters", None)
        return left if isinstance(left, int) else None

    def _save_if_due(self) -> None:
        assert self._checkpointer is not None
        self._checkpointer.step(self._position.step - 1, self._fit_state, loss=self._loss)

    def _entries(self) -> dict[str, Any]:
        """Return the parts of the model that a load fills."""
        model = self.model
        found = {"net": model.network, "optimizer": model._optimizer, "scaler": getattr(model, "_scaler", None)}
        return {name: part for name, part in found.items() if part is not None}

    def _state(self) -> dict[str, Any]:
        return {
            "fit": asdict(self._position), **self._entries(), "metrics": self._metrics.changed(),
            "callbacks": self._others.changed(), "random": RandomSnapshot(), "random_at_epoch": self._random_at_epoch,
        }  # fmt: skip

    # --- resuming ----------------------------------------------------------------------------------------------

    def _restore(self, checkpointer: Checkpointer) -> None:
        """Fill the model from the newest complete step, and set where the fit begins."""
        random, asked = RandomSnapshot(), self._position
        like = {"fit": None, **self._entries(), "metrics": None, "callbacks": None}
        if checkpointer.repository.latest() is None:
            return
        state, start = checkpointer.restore({**like, "random": random, "random_at_epoch": self._random_at_epoch})
        self._position = position = _Position(**state["fit"])
        self._steps_saved = start
        same_length = (position.epochs, position.num_iters) == (asked.epochs, asked.num_iters)
        if (position.ended and same_length) or position.epoch >= asked.epochs:
            log.info("this fit has ended with step %d", start - 1)
            self._first_epoch, self._random_at_end = asked.epochs, random
        else:
            log.info("fit continues after step %d, in epoch %d with batch %d", start - 1, position.epoch, position.batch)
            self._first_epoch = position.epoch
            self._resume = {
                "metrics": state["metrics"], "callbacks": state["callbacks"], "random": random,
                "is_between_epochs": position.ended and not position.batch,
            }  # fmt: skip
            if asked.num_iters is not None and position.num_iters is not None and position.num_iters_left is not None:
                self.model.num_iters = position.num_iters_left + asked.num_iters - position.num_iters
        position.epochs, position.num_iters, position.ended = asked.epochs, asked.num_iters, False

    def _continue(self, resume: dict[str, Any]) -> None:
        """Restore what the start of the fit and the batches that were read have changed."""
        self._resume = None
        if not resume["is_between_epochs"]:  # else the step was saved before the `on_epoch_begin` of this epoch
            self._others.restore(resume["callbacks"])
        # Paddle loads batches in a thread, some ahead, so the generators of Python and numpy follow from reading them again.
        set_random_state(resume["random"].state_dict()["paddle"])

    def _continue_at_end(self, resume: dict[str, Any], logs: dict[str, Any]) -> None:
        """Continue after an epoch of which all batches were done before the restart. Raises CkptError if it has fewer."""
        if self._read_again < self._position.batch:
            raise CkptError("the data ends before the position of the saved step: give fit the data that it had then")
        self._is_skipping = False
        if self._position.losses:
            logs["loss"] = self._position.losses  # in place of those of the skipped batches
        self._continue(resume)


_urls_of_ended_fits: set[str] = set()
"""The repositories of the fits that have ended in this process. No lock guards it, because URLs are only added."""


def _locals_of_fit(model: object) -> dict[str, Any]:
    """Return the local variables of the running `fit` of a model. Raises InvalidArgument outside of `fit`."""
    found = caller_locals("fit", lambda names: names.get("self") is model and "train_loader" in names)
    if found is not None:
        return found
    raise InvalidArgument(
        "Checkpoints works in paddle.Model.fit, which does not run here: in a loop of your own, use ckpt.Checkpointer"
    )
