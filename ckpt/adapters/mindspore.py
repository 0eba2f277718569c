"""`Checkpoints`, a callback for `Model.train` and `Model.fit` of MindSpore, and dropout that a resumed training run repeats.

MindSpore gives callbacks neither the model nor the iterator of the data, and no callback can choose the first epoch. So the
callback wraps two methods of the running model, until its training ends.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import mindspore as ms
import numpy as np
from mindspore.train import Callback, Model

from ckpt import pulse
from ckpt.adapters.epoch_random import RandomSnapshot
from ckpt.adapters.mindspore_dropout import Dropout as Dropout
from ckpt.adapters.mindspore_dropout import resumable_dropout as resumable_dropout
from ckpt.adapters.other_callbacks import OtherCallbacks
from ckpt.adapters.running_fit import FitState, caller_locals
from ckpt.checkpointer import Checkpointer
from ckpt.errors import InvalidArgument
from ckpt.repository.repository import Url
from ckpt.repository.retention import Keep
from ckpt.state.leaves.mindspore_objects import as_stateful, cell_state
from ckpt.storage.base.errors import CkptError
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

_WITHOUT_STATE = ("_StepSync", "_FrameworkProfilerCallback", "TimeMonitor", "ModelCheckpoint")


@dataclass
class _Position:
    """The position of a training run, as a step stores it."""

    training: int = 0
    """How many training runs with this callback have ended before."""
    epoch: int = 0
    """The epochs that are done, without the current one."""
    step: int = 0
    """The steps of this training run that are done."""
    steps_before: int = 0
    """The steps of the earlier training runs."""
    batches: int = 0
    """The batches of each epoch."""
    epochs: int = 0
    """The argument `epoch` of the training."""
    ended: bool = False
    """Whether the training has ended with this step."""
    outputs: Any = None
    """What the network returned in the last step. The end of an epoch needs it. A saved step has arrays in place of tensors."""


class Checkpoints(Callback):  # type: ignore[misc]
    """Saves the training of a MindSpore model in the background, and resumes it where the newest saved step ended.

        model.train(10, dataset, callbacks=[Checkpoints(url, every=100, keep=3)])

    url, every, keep, options: as for `ckpt.Checkpointer`. A step is a batch, counted over all epochs. The last one of a
        training is always saved.

    A step has the network, the optimizer, the loss scale, the position of the dataset, the random generators, and what the
    other callbacks count, such as EarlyStopping. Call `mindspore.set_seed` before the training, and `resumable_dropout` for a
    network with nn.Dropout.

    When the script runs again after a kill, `train` or `fit` restores the newest complete step, moves the dataset to its
    position, and continues with the next batch. Every loss is then that of a run without a kill. A run that has ended is
    not repeated; with more epochs it continues. Several training runs with one callback are resumed in their order.

    Raises, from `train` and `fit`:
        InvalidArgument: dataset_sink_mode is True on an accelerator, where MindSpore calls no callback between the batches;
            or the position of the dataset can't be restored.
        CkptError: The dataset has another number of batches than that of the saved step.
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
        self._uses = 0
        self._position = _Position()
        self._fit_state = FitState(self._state, "{'net': net}")
        self._has_restored = False
        self._steps_restored = 0
        self._model: Any = None
        self._batches: Any = None
        self._restored: dict[str, Any] = {}
        self._others = OtherCallbacks([])
        self._evaluation = ExitStack()

    # --- the calls of MindSpore --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Prepare for the training that begins. MindSpore also enters callbacks for evaluations, also during a training run."""
        self._uses += 1
        if self._uses == 1 and (model := _training_model()) is not None:
            self._model = model
            vars(model)["_train_process"] = self._train
            vars(model)["_train_dataset_sink_process"] = _refuse_sink
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait until the last save is committed, and leave the model as it was."""
        self._uses -= 1
        if self._uses or self._model is None:
            return
        for name in ("_train_process", "_train_dataset_sink_process", "_exec_preprocess"):
            vars(self._model).pop(name, None)
        self._model = self._batches = None
        if error[0] is not None:  # the next training resumes this one
            self._has_restored, self._restored = False, {}
            self._position = _Position(self._position.training, steps_before=self._position.steps_before)
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(*error)

    def on_train_begin(self, run_context: Any) -> None:
        """Move the dataset to the position of the restored step, and give the other callbacks what they had counted."""
        self._others.note_begin()
        data: Any = as_stateful(self._batches)
        try:
            data.get()
            if self._restored.get("batches"):
                data.set(self._restored["batches"])
                if self._restored["is_next_epoch"]:
                    next(self._batches, None)  # the end of the previous epoch
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"Checkpoints: the training dataset cannot be resumed: {error}") from error
        if self._restored:
            self._others.restore(self._restored["callbacks"])
            self._restored["random"].apply()
            self._restored = {}

    def on_train_step_end(self, run_context: Any) -> None:
        """Save the step if a save is due."""
        arguments = run_context.original_args()
        self._note(arguments)
        assert self._checkpointer is not None
        number = self._position.steps_before + self._position.step - 1
        self._checkpointer.step(number, self._fit_state, loss=_loss_of(arguments.net_outputs))

    def on_eval_begin(self, run_context: Any) -> None:
        """Mark the evaluation, so that `ckpt-run` does not count it as a hang: it takes longer than a step."""
        self._evaluation.enter_context(pulse.phase("eval"))

    def on_eval_end(self, run_context: Any) -> None:
        """Mark the end of the evaluation."""
        self._evaluation.close()

    def on_train_end(self, run_context: Any) -> None:
        """Save the last step."""
        if self._checkpointer is None:  # used without Model.train
            return
        position = self._position
        if position.step > self._steps_restored:
            position.ended = True
            position.epoch += position.step % position.batches == 0
            loss = _loss_of(run_context.original_args().net_outputs)
            self._checkpointer.save_unless_bad(position.steps_before + position.step - 1, self._fit_state, loss=loss)
        self._position = _Position(position.training + 1, steps_before=position.steps_before + position.step)

    # --- the training ------------------------------------------------------------------------------------------

    def _train(
        self, epoch: int, train_dataset: Any, list_callback: Any = None, cb_params: Any = None, initial_epoch: int = 0,
        *others: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Stand in for Model._train_process: restore, and train from the epoch of the restored step on."""
        vars(self._model).pop("_train_process")
        callbacks = list_callback._callbacks
        callbacks.remove(self)
        self._others = OtherCallbacks(callbacks, _WITHOUT_STATE)
        callbacks.append(self)  # so that a save has what the others count in the same batch
        self._checkpointer = Checkpointer(self._url, **self._options)
        before = self._position
        self._position = _Position(before.training, initial_epoch, 0, before.steps_before, int(cb_params.batch_num), epoch)
        self._steps_restored = 0
        if not self._has_restored:
            initial_epoch = self._restore(self._checkpointer, initial_epoch)
            cb_params.cur_step_num = self._position.step
            if self._position.outputs is not None:
                cb_params.net_outputs = self._position.outputs = _tensors_of(self._position.outputs)
        self._note_iterator()
        return self._model._train_process(epoch, train_dataset, list_callback, cb_params, initial_epoch, *others, **named)

    def _note_iterator(self) -> None:
        """Keep the iterator of the data when the model makes it."""
        original = self._model._exec_preprocess

        def preprocess(*arguments: Any, **named: Any) -> Any:
            helper, network = original(*arguments, **named)
            vars(self._model).pop("_exec_preprocess")
            self._batches = helper.iter.iter
            return helper, network

        vars(self._model)["_exec_preprocess"] = preprocess

    def _note(self, arguments: Any) -> None:
        self._position.step, self._position.epoch = int(arguments.cur_step_num), int(arguments.cur_epoch_num) - 1
        self._position.outputs = arguments.net_outputs

    def _entries(self) -> dict[str, Any]:
        """Return the state of the model: an entry for each of its parts."""
        model = self._model
        found = {"net": model._network, "optimizer": model._optimizer, "loss_scale": model._loss_scale_manager}
        found = {name: part for name, part in found.items() if part is not None}
        known = {id(tensor) for part in found.values() if isinstance(part, ms.nn.Cell) for tensor in cell_state(part).values()}
        others = {name: tensor for name, tensor in cell_state(model._train_network).items() if id(tensor) not in known}
        return {**found, **({"step": others} if others else {})}

    def _state(self) -> dict[str, Any]:
        position = replace(self._position, outputs=_arrays_of(self._position.outputs))
        return {
            "position": asdict(position), **self._entries(), "batches": self._batches,
            "callbacks": self._others.changed(), "random": RandomSnapshot(),
        }  # fmt: skip

    def _restore(self, checkpointer: Checkpointer, initial_epoch: int) -> int:
        """Fill the model from the newest complete step; return the epoch with which the training begins."""
        found, next_step = checkpointer.restore({"position": None})
        if not next_step:
            self._has_restored = True
            return initial_epoch
        if found["position"]["training"] > self._position.training:  # a later training run was saved; it restores everything
            self._steps_restored = self._position.step = found["position"]["steps_before"] - self._position.steps_before
            return self._position.epochs
        self._has_restored = True
        random, asked = RandomSnapshot(), self._position
        like = {"position": None, **self._entries(), "batches": None, "callbacks": None, "random": random}
        state, _ = checkpointer.restore(like)
        self._position = position = _Position(**state["position"])
        if position.batches != asked.batches:
            raise CkptError(
                f"the dataset has {asked.batches} batches, that of the saved step {position.batches}: give the data that it "
                "had then, or begin with another URL"
            )
        self._steps_restored = position.step
        has_ended = (position.ended and position.epochs == asked.epochs) or position.epoch >= asked.epochs
        self._restored = {
            "batches": None if has_ended else state["batches"],
            "is_next_epoch": position.ended and position.step % position.batches == 0,
            "callbacks": state["callbacks"],
            "random": random,
        }
        position.epochs, position.ended = asked.epochs, False
        number = position.steps_before + position.step - 1
        if has_ended:
            log.info("this training run has ended with step %d", number)
            return asked.epochs
        log.info("the training continues after step %d, in epoch %d", number, position.epoch + 1)
        return position.epoch


def _training_model() -> Any:
    """Return the model whose training run calls this; None where none does."""
    found = caller_locals("_train", lambda names: isinstance(names.get("self"), Model))
    return None if found is None else found["self"]


def _refuse_sink(*_: object, **__: object) -> None:
    raise InvalidArgument(
        "Checkpoints: with dataset_sink_mode=True MindSpore calls no callback between the batches: call train or fit with "
        "dataset_sink_mode=False"
    )


def _arrays_of(outputs: Any) -> Any:
    """Return the outputs of a step with an array in place of each tensor; None if there is anything else."""
    if isinstance(outputs, (tuple, list)):
        found = tuple(_arrays_of(each) for each in outputs)
        return None if any(each is None for each in found) else found
    return outputs.asnumpy() if isinstance(outputs, ms.Tensor) else outputs if isinstance(outputs, (int, float)) else None


def _tensors_of(outputs: Any) -> Any:
    """Return the outputs of a step from what `_arrays_of` has made of them."""
    if isinstance(outputs, (tuple, list)):
        return tuple(map(_tensors_of, outputs))
    return ms.Tensor(outputs) if isinstance(outputs, np.ndarray) else outputs


def _loss_of(outputs: object) -> float | None:
    """Return the loss of what a training step returns: a tensor, or a tuple that begins with it."""
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    return float(first.asnumpy()) if isinstance(first, ms.Tensor) and first.size == 1 else None
