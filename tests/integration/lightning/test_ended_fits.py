"""What `fit` does with a repository in which the training has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.lightning_in_process import SmallModel, small_trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping

from ckpt.adapters import lightning_end
from ckpt.errors import InvalidArgument


@pytest.mark.parametrize("limits", [{"epochs": 2}, {"epochs": 9, "max_steps": 5}])
def test_another_model_with_the_same_url_is_refused(tmp_path: Path, limits: dict[str, int]) -> None:
    """It would not be trained, because the fit resumes at the end of the first one."""
    small_trainer(tmp_path / "run", **limits).fit(SmallModel())
    second = SmallModel(seed=2)
    weights = second.layer.weight.detach().clone()
    with pytest.raises(InvalidArgument, match="this model would not be trained: give each model a URL of its own"):
        small_trainer(tmp_path / "run", **limits).fit(second)
    assert second.layer.weight.equal(weights)
    small_trainer(tmp_path / "second", **limits).fit(second)
    assert second.losses


def test_another_model_with_the_same_trainer_is_refused(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run")
    trainer.fit(SmallModel())
    with pytest.raises(InvalidArgument, match="this model would not be trained"):
        trainer.fit(SmallModel(seed=2))


def test_the_same_model_continues_with_more_epochs_in_the_process(tmp_path: Path) -> None:
    whole = SmallModel()
    small_trainer(tmp_path / "whole", epochs=3).fit(whole)
    model = SmallModel()
    small_trainer(tmp_path / "run", epochs=2).fit(model)
    small_trainer(tmp_path / "run", epochs=2).fit(model)  # trains nothing, and is not refused
    small_trainer(tmp_path / "run", epochs=3).fit(model)
    assert model.losses == whole.losses


def test_a_new_object_of_the_model_continues_an_ended_fit_with_more_epochs(tmp_path: Path) -> None:
    """As in a notebook, where a cell runs again."""
    whole, first, second = SmallModel(), SmallModel(), SmallModel()
    small_trainer(tmp_path / "whole", epochs=3).fit(whole)
    small_trainer(tmp_path / "run", epochs=2).fit(first)
    small_trainer(tmp_path / "run", epochs=3).fit(second)
    assert first.losses + second.losses == whole.losses


class StoppingModel(SmallModel):
    """A model that logs a value which gets no better."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("value", 1.0, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def _early_stopping(check_on_train_epoch_end: bool = True) -> EarlyStopping:
    return EarlyStopping("value", patience=1, check_on_train_epoch_end=check_on_train_epoch_end)


@pytest.mark.parametrize("every", [1, 1000])
def test_a_fit_that_early_stopping_has_ended_is_not_continued_by_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    first, second, third = StoppingModel(), StoppingModel(), StoppingModel()
    small_trainer(tmp_path / "run", _early_stopping(), epochs=9, every=every).fit(first)
    assert first.losses[-1][0] == 1
    monkeypatch.setattr(lightning_end, "_models", {})  # as in another process
    small_trainer(tmp_path / "run", _early_stopping(), epochs=9, every=every).fit(second)
    assert second.losses == []
    assert second.layer.weight.equal(first.layer.weight)
    small_trainer(tmp_path / "run", _early_stopping(), epochs=10, every=every).fit(third)
    assert third.losses[0][0] == 2


def test_another_model_is_refused_after_early_stopping(tmp_path: Path) -> None:
    small_trainer(tmp_path / "run", _early_stopping(), epochs=9).fit(StoppingModel())
    with pytest.raises(InvalidArgument, match="this model would not be trained"):
        small_trainer(tmp_path / "run", _early_stopping(), epochs=9).fit(StoppingModel())


class Pausing(Callback):
    """Stops a fit, as a program does that has been asked to leave its machine."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 5


def test_a_fit_that_other_code_has_stopped_is_continued(tmp_path: Path) -> None:
    whole, first, second = SmallModel(), SmallModel(), SmallModel()
    small_trainer(tmp_path / "whole").fit(whole)
    small_trainer(tmp_path / "run", Pausing()).fit(first)
    small_trainer(tmp_path / "run", Pausing()).fit(second)
    assert len(first.losses) == 5
    assert first.losses + second.losses == whole.losses
