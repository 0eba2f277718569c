"""paddle.Model.fit with the callback of ckpt: killed, resumed, ended, continued, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.bad_last_loss import check_last_step_with_a_bad_loss
from helpers.folders import PROGRAMS
from helpers.refusal import refused
from paddle import nn

import ckpt
from ckpt.adapters.paddle import Checkpoints
from ckpt.adapters.testing import ResumeContract
from ckpt.errors import InvalidArgument
from ckpt.storage.base.errors import CkptError


class _Fit(ResumeContract):
    program = PROGRAMS / "paddle_fit.py"

    def test_a_killed_training_has_the_losses_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        super().test_a_killed_training_has_the_losses_of_an_undisturbed_one(tmp_path)
        # the model, what EarlyStopping has counted, and the next random number
        assert (tmp_path / "b.log.end").read_text() == (tmp_path / "a.log.end").read_text()


class TestDataset(_Fit):
    """It is killed in the first epoch, and after step 23, the last one of the third epoch, was saved."""

    arguments = ("dataset",)
    kill_after = (7, 26)


class TestOrderOfNumpy(_Fit):
    arguments = ("loader",)
    kill_after = (13, 18)


class TestTwoBatchesForEachUpdate(_Fit):
    arguments = ("accumulate",)
    kill_after = (9, 20)


# --- in this process -----------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """Ends a fit in the middle."""


class Seen(list[str]):
    """A list that is not a part of a saved step, because it is of a class of its own."""


class Losses(paddle.callbacks.Callback):
    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.found, self.calls = Seen(), Seen()
        self._stop_after = stop_after

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_eval_end(self, logs: Any = None) -> None:
        self.calls.append("eval")

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("end")

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.found.append(float(logs["loss"][0]).hex())
        if len(self.found) == self._stop_after:
            raise Interrupted


class EpochEnds(paddle.callbacks.Callback):
    """Records the loss at the end of each epoch, and ends the fit at one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.found = Seen()
        self._stop_at = stop_at

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append(f"{epoch} {float(logs['loss'][0]).hex()}")
        if epoch == self._stop_at:
            raise Interrupted


class Halve(paddle.callbacks.Callback):
    """Halves the learning rate in each epoch, starting from the one that it finds in the first epoch. Counts the epochs."""

    begun = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1
        if epoch == 0:
            self.first_rate = self.model._optimizer.get_lr()
        self.model._optimizer.set_lr(self.first_rate * 0.5**epoch)


class Rows(paddle.io.Dataset):
    def __init__(self, rows: int = 16) -> None:
        self.rows = np.random.RandomState(2).normal(size=(rows, 4)).astype("float32")

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.rows[index, :2]

    def __len__(self) -> int:
        return len(self.rows)


def make(width: int = 8) -> paddle.Model:
    paddle.seed(3)
    net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.4), nn.Linear(width, 2))
    model = paddle.Model(net)
    model.prepare(paddle.optimizer.Adam(0.02, parameters=net.parameters()), nn.MSELoss())
    return model


class Stream(paddle.io.IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Any:
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


def stream() -> paddle.io.DataLoader:
    return paddle.io.DataLoader(Stream(), batch_size=4)


def fit(
    saving: Any, epochs: int, model: Any = None, stop_after: int | None = None, rows: int = 16, data: Any = None,
    others: Any = (), **more: Any,
) -> Losses:  # fmt: skip
    watch = Losses(stop_after)
    callbacks = [each for each in (watch, *others, saving) if each is not None]
    options = {"epochs": epochs, "batch_size": 4, "verbose": 0} | more
    (model or make()).fit(Rows(rows) if data is None else data, Rows(4), callbacks=callbacks, **options)
    return watch


def test_an_interrupted_fit_resumes_with_a_new_callback_and_with_the_same_one(tmp_path: Path) -> None:
    expected = list(fit(None, 4).found)
    with pytest.raises(Interrupted):
        fit(Checkpoints(tmp_path, every=1), 4, stop_after=6)
    assert ckpt.open(tmp_path).steps()[-1] == 4
    saving = Checkpoints(tmp_path, every=1)
    with pytest.raises(Interrupted):
        fit(saving, 4, stop_after=4)
    resumed = fit(saving, 4)
    assert list(resumed.found) == expected[8:]
    assert list(resumed.calls) == ["epoch 2", "eval", "epoch 3", "eval", "end"]


def test_what_a_callback_sets_in_the_first_epoch_is_restored(tmp_path: Path) -> None:
    expected = list(fit(None, 4, others=[Halve()]).found)
    with pytest.raises(Interrupted):
        fit(Checkpoints(tmp_path, every=1), 4, others=[Halve()], stop_after=10)
    assert list(fit(Checkpoints(tmp_path, every=1), 4, others=[Halve()]).found) == expected[9:]


def test_a_fit_that_has_ended_is_not_repeated_and_continues_with_more_epochs(tmp_path: Path, monkeypatch: Any) -> None:
    expected = list(fit(None, 3, others=[Halve()]).found)
    assert list(fit(Checkpoints(tmp_path, every=None), 2, others=[Halve()]).found) == expected[:8]
    after = paddle.rand([1]).item()
    assert ckpt.open(tmp_path).steps() == [7]
    with refused(InvalidArgument, "has ended in this process", "a URL of its own"):
        fit(Checkpoints(tmp_path), 2)
    monkeypatch.setattr("ckpt.adapters.paddle_fit._urls_of_ended_fits", set())  # as in another process
    again = fit(Checkpoints(tmp_path), 2)
    assert (list(again.found), list(again.calls)) == ([], ["end"])
    assert paddle.rand([1]).item() == after
    monkeypatch.setattr("ckpt.adapters.paddle_fit._urls_of_ended_fits", set())
    halve = Halve()
    assert list(fit(Checkpoints(tmp_path), 3, others=[halve]).found) == expected[8:]
    assert halve.begun == 3


def test_a_fit_on_data_without_a_length_continues_with_the_next_epoch(tmp_path: Path, monkeypatch: Any) -> None:
    expected = list(fit(None, 3, data=stream()).found)
    fit(Checkpoints(tmp_path, every=None), 2, data=stream())
    monkeypatch.setattr("ckpt.adapters.paddle_fit._urls_of_ended_fits", set())  # as in another process
    ends = EpochEnds()
    again = fit(Checkpoints(tmp_path), 3, data=stream(), others=[ends])
    assert list(again.found) == expected[8:]
    assert list(again.calls) == ["epoch 2", "eval", "end"]
    assert [each.split()[0] for each in ends.found] == ["2"]


def test_an_epoch_without_a_length_ends_with_its_last_loss_after_a_kill(tmp_path: Path) -> None:
    whole, resumed, saving = EpochEnds(), EpochEnds(), Checkpoints(tmp_path, every=1)
    expected = list(fit(None, 2, data=stream(), others=[whole]).found)
    with pytest.raises(Interrupted):
        fit(saving, 2, data=stream(), others=[EpochEnds(stop_at=0)])
    saving._close(None)
    assert ckpt.open(tmp_path).steps()[-1] == 3
    again = fit(Checkpoints(tmp_path, every=1), 2, data=stream(), others=[resumed])
    assert list(again.found) == expected[4:]
    assert list(resumed.found) == list(whole.found)


@pytest.mark.parametrize("stop_after", [7, 10])
def test_a_number_of_batches_counts_those_before_the_restart(tmp_path: Path, stop_after: int, monkeypatch: Any) -> None:
    """Paddle counts the batches of evaluations, too: 13 are those of two epochs and three more."""
    expected = list(fit(None, 1, num_iters=14).found)
    assert len(expected) == 12
    with pytest.raises(Interrupted):
        fit(Checkpoints(tmp_path, every=1), 1, stop_after=stop_after, num_iters=13)
    assert list(fit(Checkpoints(tmp_path, every=1), 1, num_iters=13).found) == expected[stop_after - 1 : 11]
    monkeypatch.setattr("ckpt.adapters.paddle_fit._urls_of_ended_fits", set())  # as in another process
    assert list(fit(Checkpoints(tmp_path, every=1), 1, num_iters=14).found) == expected[11:]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = make()
    names = set(vars(model))
    fit(Checkpoints(tmp_path, every=None), 1, model)
    assert not {"_run_one_epoch", "train_batch"} & (set(vars(model)) - names)
    with pytest.raises(Interrupted):
        fit(Checkpoints(tmp_path / "other", every=None), 1, model, stop_after=1)
    assert not {"_run_one_epoch", "train_batch"} & set(vars(model))
    assert len(fit(None, 1, model).found) == 4


def test_other_models_and_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        fit(Checkpoints(tmp_path, every=1), 2, stop_after=4)
    with refused(CkptError, "net"):
        fit(Checkpoints(tmp_path), 2, make(width=5))
    with refused(CkptError, "the data ends before the position of the saved step"):
        fit(Checkpoints(tmp_path), 2, rows=4)
    paddle.enable_static()
    try:
        callback = Checkpoints(tmp_path)
        with refused(InvalidArgument, "dynamic mode"):
            callback.on_train_begin()
    finally:
        paddle.disable_static()
    assert ckpt.open(tmp_path).steps()[-1] == 2


def test_last_step_is_saved_by_no_rank_if_one_has_a_bad_loss(tmp_path: Path) -> None:
    check_last_step_with_a_bad_loss("paddle", tmp_path)
