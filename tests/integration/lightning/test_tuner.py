"""The trial steps of the learning rate finder and of the batch size finder are not steps of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.lightning_in_process import SmallModel, small_trainer
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner

import ckpt
from ckpt.adapters import lightning_end


def _lr(trainer: Any, model: SmallModel) -> None:
    Tuner(trainer).lr_find(model, num_training=12, min_lr=1e-4, max_lr=0.1)


def _batch_size(trainer: Any, model: SmallModel) -> None:
    Tuner(trainer).scale_batch_size(model, max_trials=2)


@pytest.mark.parametrize("tune", [_lr, _batch_size])
def test_the_tuner_neither_saves_nor_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: Any) -> None:
    monkeypatch.chdir(tmp_path)
    whole = SmallModel()
    trainer = small_trainer(None)
    tune(trainer, whole)
    whole.losses.clear()
    trainer.fit(whole)

    for _ in range(2):  # the script, and its restart
        monkeypatch.setattr(lightning_end, "_models", {})  # as in another process
        model = SmallModel()
        trainer = small_trainer(tmp_path / "run")
        steps = len(ckpt.open(tmp_path / "run").steps()) if (tmp_path / "run").exists() else 0
        tune(trainer, model)
        assert not (tmp_path / "run").exists() or len(ckpt.open(tmp_path / "run").steps()) == steps
        assert (model.lr, model.batch_size) == (whole.lr, whole.batch_size)
        model.losses.clear()
        trainer.fit(model)
        assert model.losses == ([] if steps else whole.losses)


@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder"])
def test_a_finder_in_a_resumed_fit_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)

    def finder() -> Any:
        if name == "BatchSizeFinder":
            return callbacks.BatchSizeFinder(max_trials=2)
        return callbacks.LearningRateFinder(num_training_steps=12, min_lr=1e-4, max_lr=0.1)

    def fitted(url: Path, max_steps: int) -> tuple[list[int], list[Any]]:
        model = SmallModel()
        trials: list[int] = []
        trainer = small_trainer(url, finder(), _NoteTrials(trials), max_steps=max_steps)
        trainer.fit(model)
        return trials, model.losses[trials[0] :]

    _, whole = fitted(tmp_path / "whole", 7)
    trials, first = fitted(tmp_path / "run", 3)
    assert trials[0] > 3
    assert ckpt.open(tmp_path / "run").steps() == [0, 1, 2]
    _, second = fitted(tmp_path / "run", 7)
    assert first + second == whole
    assert ckpt.open(tmp_path / "run").steps() == list(range(7))


class _NoteTrials(callbacks.Callback):
    """Notes how many batches were trained when the trials end, which is when the fit starts."""

    def __init__(self, trials: list[int]) -> None:
        self.trials = trials

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trials.append(len(pl_module.losses))
