"""Model.train and Model.fit of MindSpore with the callback of ckpt: killed, resumed, ended, continued, and refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from helpers.folders import PROGRAMS
from helpers.refusal import refused
from mindspore import nn
from mindspore.train import Callback, History, Model

import ckpt
from ckpt.adapters.mindspore import Checkpoints
from ckpt.adapters.testing import ResumeContract
from ckpt.errors import InvalidArgument
from ckpt.storage.base.errors import CkptError


class _Training(ResumeContract):
    program = PROGRAMS / "mindspore_model_training.py"

    def test_a_killed_training_has_the_losses_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        super().test_a_killed_training_has_the_losses_of_an_undisturbed_one(tmp_path)
        if (tmp_path / "a.log.end").exists():  # what the other callbacks have counted
            assert (tmp_path / "b.log.end").read_text() == (tmp_path / "a.log.end").read_text()


class TestFitInPyNative(_Training):
    arguments = ("pynative",)


class TestFitInGraphMode(_Training):
    """It is killed after the last batch of an epoch, of which the end is still to come, and after the first one."""

    arguments = ("graph",)
    kill_after = (9, 15)


class TestTrainWithLossScale(_Training):
    arguments = ("scaled",)
    kill_after = (3, 21)


def losses(log: Path) -> dict[int, str]:
    return {int(step): loss for step, loss in (line.split() for line in log.read_text().splitlines())}


def test_a_training_that_has_ended_is_not_repeated_and_continues_with_more_epochs(tmp_path: Path) -> None:
    def run(repository: str, log: str, epochs: int) -> dict[int, str]:
        arguments = [str(tmp_path / repository), str(tmp_path / log), "pynative", str(epochs)]
        subprocess.run([sys.executable, str(PROGRAMS / "mindspore_model_training.py"), *arguments], check=True, timeout=600)
        return losses(tmp_path / log)

    whole = run("other", "whole", 5)
    assert min(whole) == 0
    assert len(whole) == 25
    first = run("run", "first", 3)
    assert run("run", "first", 3) == first
    second = run("run", "second", 5)
    assert min(second) == 15
    assert first | second == whole
    assert (tmp_path / "second.end").read_text() == (tmp_path / "whole.end").read_text()


# --- in this process -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def surroundings() -> Any:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_seed(1)


class Losses(Callback):
    """Collects the losses of one run. The list is in an object that no step has: lists of callbacks are saved and restored."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self._run: Any = SimpleNamespace(found=[])
        self._stop_after = stop_after

    @property
    def found(self) -> list[tuple[int, bytes]]:
        return self._run.found

    def on_train_step_end(self, run_context: Any) -> None:
        arguments = run_context.original_args()
        self.found.append((arguments.cur_step_num, arguments.net_outputs.asnumpy().tobytes()))
        if len(self.found) == self._stop_after:
            raise KeyboardInterrupt


def data(rows: int = 12, seed: int = 3) -> Any:
    ms.set_seed(seed)
    values = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    return ds.NumpySlicesDataset({"x": values, "y": values[:, :2].copy()}, shuffle=True).batch(3)


def model(width: int = 2, optimizer: Any = nn.Adam) -> Model:
    ms.set_seed(2)
    net = nn.Dense(4, width)
    return Model(net, nn.MSELoss(), optimizer(net.trainable_params(), 0.1))


def train(saving: Any, epochs: int, made: Model, stop_after: int | None = None, rows: int = 12, **options: Any) -> list[Any]:
    watch = Losses(stop_after)
    made.train(epochs, data(rows), callbacks=[watch, *([saving] if saving else [])], **options)
    return watch.found


def test_an_interrupted_training_resumes_with_a_new_callback_and_with_the_same_one(tmp_path: Path) -> None:
    expected = train(None, 4, model())
    with pytest.raises(KeyboardInterrupt):
        train(Checkpoints(tmp_path, every=1), 4, model(), stop_after=6)
    assert ckpt.open(tmp_path).steps()[-1] == 4
    saving = Checkpoints(tmp_path, every=1)
    with pytest.raises(KeyboardInterrupt):
        assert train(saving, 4, model(), stop_after=4) == []
    assert train(saving, 4, model()) == expected[8:]


class EvaluationStop(Callback):
    """Ends the training by an exception when an evaluation begins."""

    def on_eval_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_epoch_num == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("every", [1, 4])
def test_a_training_resumes_between_the_last_batch_of_an_epoch_and_its_evaluation(tmp_path: Path, every: int) -> None:
    def fit(*callbacks: Any) -> tuple[dict[str, Any], list[Any]]:
        ms.set_seed(2)
        net = nn.Dense(4, 2)
        made = Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.1), metrics={"mae": nn.MAE()})
        history, watch = History(), Losses()
        made.fit(3, data(), data(), callbacks=[history, watch, *callbacks])
        return history.history, watch.found

    counted, expected = fit()
    with pytest.raises(KeyboardInterrupt):
        fit(Checkpoints(tmp_path, every=every), EvaluationStop())
    assert ckpt.open(tmp_path).steps()[-1] == 7
    assert fit(Checkpoints(tmp_path, every=every)) == (counted, expected[8:])


def test_two_trainings_with_one_callback_are_resumed_in_their_order(tmp_path: Path) -> None:
    def both(saving: Any, stop_after: int | None = None) -> list[Any]:
        made = model()
        first = train(saving, 2, made)
        return [first, train(saving, 2, made, stop_after)]

    expected = both(None)
    assert both(Checkpoints(tmp_path / "quiet", every=3)) == expected
    assert ckpt.open(tmp_path / "quiet").steps() == [2, 5, 7, 8, 11, 14, 15]
    with pytest.raises(KeyboardInterrupt):
        both(Checkpoints(tmp_path / "run", every=3), stop_after=6)
    assert both(Checkpoints(tmp_path / "run", every=3)) == [[], expected[1][4:]]
    assert both(Checkpoints(tmp_path / "run", every=3)) == [[], []]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    made = model()
    names = set(vars(made))
    train(Checkpoints(tmp_path, every=None), 1, made)
    assert {name for name in vars(made) if name not in names} <= {"_current_epoch_num", "_current_step_num", "batch_num"}
    made.eval(data(), callbacks=[Checkpoints(tmp_path / "unused")]) if made._metrics else None
    train(None, 1, made)
    assert ckpt.open(tmp_path).steps() == [3]


def test_the_entries_of_a_step(tmp_path: Path) -> None:
    train(Checkpoints(tmp_path, every=2), 1, model())
    opened = ckpt.open(tmp_path)[1]
    assert {name for name in opened if not name.startswith("random")} >= {"net.weight", "net.bias", "optimizer.global_step"}
    net = nn.Dense(4, 2)
    ckpt.load(tmp_path, like={"net": net})
    assert net.weight.asnumpy().any()


def test_other_networks_optimizers_and_data_are_refused(tmp_path: Path) -> None:
    train(Checkpoints(tmp_path, every=1), 2, model())
    with refused(CkptError, "net.weight"):
        train(Checkpoints(tmp_path), 3, model(width=3))
    with refused(CkptError, "optimizer"):
        train(Checkpoints(tmp_path), 3, model(optimizer=nn.SGD))
    with refused(CkptError, "the dataset has 3 batches, that of the saved step 4"):
        train(Checkpoints(tmp_path), 3, model(), rows=9)
    assert ckpt.open(tmp_path).steps()[-1] == 7


def test_another_seed_and_no_seed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(Checkpoints(tmp_path, every=1), 2, model(), stop_after=3)
    made, rows = model(), data(seed=4)
    with refused(InvalidArgument, "the training dataset cannot be resumed", "set_seed(3)"):
        made.train(2, rows, callbacks=[Checkpoints(tmp_path)])
    program = (
        "import sys, numpy as np, mindspore.dataset as ds\n"
        "from mindspore import nn\n"
        "from mindspore.train import Model\n"
        "from ckpt.adapters.mindspore import Checkpoints\n"
        "net = nn.Dense(4, 2)\n"
        "model = Model(net, nn.MSELoss(), nn.Adam(net.trainable_params()))\n"
        "rows = ds.NumpySlicesDataset({'x': np.ones((6, 4), 'f'), 'y': np.ones((6, 2), 'f')}).batch(2)\n"
        "model.train(1, rows, callbacks=[Checkpoints(sys.argv[1])])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"GLOG_v": "4"})
    assert done.returncode == 1
    assert "call mindspore.set_seed() before it is created" in done.stderr


def test_data_that_is_sunk_to_an_accelerator_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host, MindSpore never sinks data; here it believes that it runs on an accelerator when it asks for that."""
    get = ms.context.get_context
    monkeypatch.setattr(ms.train.model.context, "get_context", lambda key: "Ascend" if key == "device_target" else get(key))
    with refused(InvalidArgument, "dataset_sink_mode=False"):
        train(Checkpoints(tmp_path), 1, model(), dataset_sink_mode=True)
