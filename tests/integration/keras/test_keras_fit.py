"""A fit that is killed twice, in the middle of epochs, has every loss and the history of an undisturbed fit, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from ckpt.adapters.testing import ResumeContract

PROGRAM = Path(__file__).parent / "train.py"


class _FitContract(ResumeContract):
    program = PROGRAM
    kill_after: ClassVar = (6, 20)
    epochs = 4

    def test_a_killed_training_has_the_losses_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        super().test_a_killed_training_has_the_losses_of_an_undisturbed_one(tmp_path)
        undisturbed, resumed = (json.loads((tmp_path / f"{name}.history").read_text()) for name in "ab")
        assert resumed == undisturbed
        assert resumed["epochs"] == list(range(self.epochs))
        assert {"loss", "mae", "val_loss", "learning_rate"} <= resumed.keys()


class TestTensorflowArrays(_FitContract):
    arguments = ("tensorflow", "arrays")


@pytest.mark.essential
class TestTensorflowDataset(_FitContract):
    arguments = ("tensorflow", "dataset")


class TestTensorflowGenerator(_FitContract):
    arguments = ("tensorflow", "generator")


class TestTensorflowSubclassed(_FitContract):
    arguments = ("tensorflow", "subclassed")


class TestTensorflowCompiled(_FitContract):
    """By XLA, which Keras chooses by itself on a GPU; on jax, all the others are compiled."""

    arguments = ("tensorflow", "compiled")


class TestTorchTwoOptimizers(_FitContract):
    arguments = ("torch", "two_optimizers")


class TestTensorflowSeveralSteps(_FitContract):
    arguments = ("tensorflow", "several_steps")


class TestTorchArrays(_FitContract):
    arguments = ("torch", "arrays")


class TestTorchLoader(_FitContract):
    arguments = ("torch", "loader")


class TestJaxArrays(_FitContract):
    arguments = ("jax", "arrays")


class TestTorchPasses(_FitContract):
    """An epoch is half of a pass. The kills are in the second half of the second and of the third pass."""

    arguments = ("torch", "passes")
    kill_after = (14, 22)
    epochs = 6


class TestJaxSubclassed(_FitContract):
    arguments = ("jax", "subclassed")


@pytest.mark.parametrize(("backend", "kind"), [("torch", "arrays"), ("jax", "arrays")])
def test_more_epochs_continue_with_the_losses_of_one_longer_fit(tmp_path: Path, backend: str, kind: str) -> None:
    for name, epochs in (("a", "4"), ("b", "2"), ("b", "4")):
        command = [sys.executable, str(PROGRAM), str(tmp_path / name), str(tmp_path / f"{name}.log"), backend, kind]
        done = subprocess.run(command, env=os.environ | {"EPOCHS": epochs}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    for suffix in ("log", "history"):
        assert (tmp_path / f"b.{suffix}").read_text() == (tmp_path / f"a.{suffix}").read_text()
