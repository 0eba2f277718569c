"""DeepSpeed below a Trainer of Lightning: what is killed and started again has the losses of a whole run."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from helpers.lightning_runs import Training
from helpers.refusal import refused
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DeepSpeedStrategy

import ckpt
from ckpt.adapters.lightning import CkptIO
from ckpt.adapters.lightning_state import require_supported_strategy


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        pytest.param(9, ["--deepspeed-stage=1"], id="stage 1"),
        pytest.param(9, ["--deepspeed-stage=3", "--precision=bf16-true"], id="stage 3"),
        # An epoch has 6 batches, so its last update needs two batches of the next one.
        pytest.param(15, ["--deepspeed-stage=2", "--accumulate=4"], id="stage 2, an update over two epochs"),
    ],
)
def test_losses_after_a_kill(tmp_path: Path, batches: int, options: list[str]) -> None:
    Training(tmp_path, "--ranks=2", *options).killed_and_resumed(batches, ranks=2)


def test_a_step_of_another_strategy_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path, "--epochs=1")
    training.run("plain")
    assert "was saved by another strategy: resume with that one" in training.run("plain", "--deepspeed-stage=1", status=1)
    training.run("engine", "--deepspeed-stage=1")
    assert "was not saved by Checkpoints with this strategy" in training.run("engine", status=1)


def trainer(folder: Path, **more: object) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", max_steps=1, logger=False, default_root_dir=folder, enable_progress_bar=False, **more)


def test_a_plugin_that_the_strategy_would_ignore_is_refused(tmp_path: Path) -> None:
    class OnCpu(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            pass

    with refused(ckpt.InvalidArgument, "ignores plugins=[CkptIO(url)]", "callbacks=[Checkpoints(url, every=100)]"):
        trainer(tmp_path, strategy=OnCpu(), plugins=[CkptIO(tmp_path / "io")]).fit(BoringModel())
    trainer(tmp_path, plugins=[CkptIO(tmp_path / "io")]).fit(BoringModel())


def test_options_with_which_nothing_would_be_loaded_are_refused() -> None:
    with refused(ckpt.InvalidArgument, "remove load_full_weights=True"):
        require_supported_strategy(DeepSpeedStrategy(stage=3, load_full_weights=True))
    require_supported_strategy(DeepSpeedStrategy(stage=3))
