"""Ends, errors and several calls of fit with the callback, on the backend that Keras takes by default (KERAS_BACKEND)."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from helpers.bad_last_loss import check_last_step_with_a_bad_loss

import ckpt
from ckpt.adapters.keras import Checkpoints
from ckpt.errors import CkptError, LeafMismatch
from ckpt.storage.base.errors import InvalidArgument

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BATCHES = 6


class Stop(Exception):
    """Ends a fit as an error of the user's code would."""


class Count(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the losses, and ends the fit after a number of batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.losses: list[float] = []
        self._stop_after = stop_after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])
        if len(self.losses) == self._stop_after:
            raise Stop


class Halve(keras.callbacks.Callback):  # type: ignore[misc]
    """Halves the learning rate in each epoch, starting from the one that it finds in the first epoch. Counts the epochs."""

    begun = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun += 1
        optimizer = self.model.optimizer
        if epoch == 0:
            self.first_rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        optimizer.learning_rate = self.first_rate * 0.5**epoch


def make_model(metrics: Any = ("mae",), width: int = 8) -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([layers.Input((4,)), layers.Dense(width), layers.Dropout(0.3), layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=list(metrics))
    return model


def fit(model: Any, callback: Any, *others: Any, epochs: int = 3, rows: int = len(X), **options: Any) -> Any:
    return model.fit(X[:rows], Y[:rows], batch_size=4, epochs=epochs, verbose=0, callbacks=[callback, *others], **options)


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which a fit is as one of another process."""
    return lambda: monkeypatch.setattr("ckpt.adapters.keras._urls_of_ended_fits", set())


def weights(model: Any) -> list[bytes]:
    return [value.tobytes() for value in model.get_weights()]


def test_a_fit_that_has_ended_is_not_repeated(tmp_path: Path, restart: Callable[[], None]) -> None:
    done, count = make_model(), Count()
    made = fit(done, Checkpoints(tmp_path, every=100))
    assert ckpt.open(tmp_path).latest().commit.step == 3 * BATCHES - 1
    restart()
    again = make_model()
    found = fit(again, Checkpoints(tmp_path, every=100), count)
    assert count.losses == []
    assert weights(again) == weights(done)
    assert found.history == made.history


def test_more_epochs_continue_a_fit(tmp_path: Path) -> None:
    long, longer = Count(), Count()
    undisturbed = fit(make_model(), Checkpoints(tmp_path / "a", every=100), long, Halve(), epochs=4)
    fit(make_model(), Checkpoints(tmp_path / "b", every=100), Halve(), epochs=2)
    halve = Halve()
    found = fit(make_model(), Checkpoints(tmp_path / "b", every=100), longer, halve, epochs=4)
    assert longer.losses == long.losses[2 * BATCHES :]
    assert found.history == undisturbed.history
    assert halve.begun == 4


def test_an_interrupted_callback_resumes_when_it_is_used_again(tmp_path: Path) -> None:
    whole, first, second = Count(), Count(stop_after=9), Count()
    fit(make_model(), Checkpoints(tmp_path / "a", every=100), whole)
    callback = Checkpoints(tmp_path / "b", every=4)
    with pytest.raises(Stop):
        fit(make_model(), callback, first)
    fit(make_model(), callback, second)
    assert first.losses == whole.losses[:9]
    assert second.losses == whole.losses  # what it had recorded up to the saved step is restored, too


def test_what_a_callback_sets_in_the_first_epoch_is_restored(tmp_path: Path) -> None:
    whole, resumed = Count(), Count()
    fit(make_model(), Checkpoints(tmp_path / "a", every=100), Halve(), whole)
    callback = Checkpoints(tmp_path / "b", every=4)
    with pytest.raises(Stop):
        fit(make_model(), callback, Halve(), Count(stop_after=2 * BATCHES + 3))
    callback._checkpointer.close()
    fit(make_model(), Checkpoints(tmp_path / "b", every=100), Halve(), resumed)
    assert resumed.losses == whole.losses


def test_several_calls_of_fit_are_skipped_or_resumed_in_their_order(tmp_path: Path, restart: Callable[[], None]) -> None:
    def script(url: Path, stop_after: int | None = None) -> list[list[float]]:
        restart()
        callback, counts = Checkpoints(url, every=3), [Count(), Count(stop_after)]
        model = make_model()
        fit(model, callback, counts[0], epochs=2)
        model.compile(optimizer="sgd", loss="mae", metrics=[])  # a step of this part does not fit the model above
        try:
            fit(model, callback, counts[1], epochs=2)
        except Stop:
            callback._checkpointer.close()
        return [count.losses for count in counts]

    whole = script(tmp_path / "a")
    stopped = script(tmp_path / "b", stop_after=8)
    resumed = script(tmp_path / "b")
    assert stopped == [whole[0], whole[1][:8]]
    assert resumed == [[], whole[1]]


def test_a_cross_validation_with_one_url_is_refused(tmp_path: Path) -> None:
    """The second fit would be skipped, and its model would be that of the first."""
    fit(make_model(), Checkpoints(tmp_path, every=100))
    with pytest.raises(InvalidArgument, match="would be skipped: give each model its own URL"):
        fit(make_model(), Checkpoints(tmp_path, every=100), rows=20)
    for fold in range(2):
        count = Count()
        fit(make_model(), Checkpoints(tmp_path / f"fold{fold}", every=100), count, rows=20)
        assert count.losses


def test_an_early_stop_is_an_end(tmp_path: Path, restart: Callable[[], None]) -> None:
    stopping, count = keras.callbacks.EarlyStopping(monitor="loss", min_delta=1e9, patience=1), Count()
    fit(make_model(), Checkpoints(tmp_path, every=100), stopping, epochs=9)
    restart()
    fit(make_model(), Checkpoints(tmp_path, every=100), count, epochs=9)
    assert count.losses == []


def _interrupt(url: Path) -> None:
    callback = Checkpoints(url, every=4)
    with pytest.raises(Stop):
        fit(make_model(), callback, Count(stop_after=10))
    callback._checkpointer.close()


def test_shorter_data_other_metrics_and_another_model_are_refused(tmp_path: Path) -> None:
    _interrupt(tmp_path)
    with pytest.raises(CkptError, match="the data ends before the position of the saved step"):
        fit(make_model(), Checkpoints(tmp_path), rows=4)
    with pytest.raises(CkptError, match="the metrics are not those of the saved step"):
        fit(make_model(metrics=["mae", "mse"]), Checkpoints(tmp_path))
    with pytest.raises(LeafMismatch, match="leaf model.layers.dense.kernel: .* shape"):
        fit(make_model(width=9), Checkpoints(tmp_path))
    assert ckpt.open(tmp_path).latest().commit.step == 7


def test_another_callback_that_restores_is_refused(tmp_path: Path) -> None:
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    with pytest.raises(InvalidArgument, match="remove BackupAndRestore from the callbacks"):
        fit(make_model(), Checkpoints(tmp_path / "run"), backup)


def test_outside_of_fit_the_callback_is_refused(tmp_path: Path) -> None:
    callback = Checkpoints(tmp_path)
    callback.set_model(make_model())
    callback.set_params({"epochs": 1, "steps": 1})
    with pytest.raises(InvalidArgument, match=r"Checkpoints works in Model.fit of Keras 3"):
        callback.on_train_begin()


def test_a_warning_names_a_shuffle_that_is_not_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("the other backends repeat the order by their global generators")
    from tensorflow.python.eager import context

    model = make_model()
    fit(model, Checkpoints(tmp_path / "a"), epochs=1)
    assert "will not repeat" not in caplog.text
    context.set_global_seed(None)
    fit(model, Checkpoints(tmp_path / "b"), epochs=1)
    assert "fit shuffles in an order that a resumed run will not repeat" in caplog.text


def test_last_step_is_saved_by_no_rank_if_one_has_a_bad_loss(tmp_path: Path) -> None:
    check_last_step_with_a_bad_loss("keras", tmp_path)
