"""What `fit` does with a repository in which the training has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.lightning_in_process import SmallModel, small_trainer

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
