"""An epoch that is resumed in its middle: hooks that set the state of the epoch at its start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_in_process import SmallModel, small_trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, GradientAccumulationScheduler


class Counting(Callback):
    """Sets the factor of the loss from the number of the epoch, and counts the epochs."""

    begun = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.begun += 1
        pl_module.factor = trainer.current_epoch + 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun = state_dict["begun"]


class EpochModel(SmallModel):
    """A model whose loss has a factor, and whose own hook counts epochs in a buffer and halves the learning rate."""

    factor = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epochs", torch.zeros(1))

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor


class BackboneModel(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([self.backbone(batch[0])], batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), self.lr, momentum=0.9)


def _accumulation() -> Callback:
    return GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})


def _finetuning() -> Callback:
    return BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)


@pytest.mark.parametrize(
    ("model", "callback", "steps"),
    [
        pytest.param(SmallModel, _accumulation, 10, id="accumulated gradients by epoch"),
        pytest.param(EpochModel, Counting, 11, id="hooks of the user"),
        pytest.param(BackboneModel, _finetuning, 11, id="a backbone that is trained from this epoch on"),
    ],
)
def test_hooks_of_the_start_of_an_epoch_are_called_in_its_middle(
    tmp_path: Path, model: Callable[[], Any], callback: Callable[[], Any], steps: int
) -> None:
    whole, first, second = model(), model(), model()
    callbacks = [callback() for _ in range(3)]
    small_trainer(tmp_path / "whole", callbacks[0], epochs=3).fit(whole)
    small_trainer(tmp_path / "run", callbacks[1], epochs=3, max_steps=steps).fit(first)
    assert first.losses[-1][0] == 1
    small_trainer(tmp_path / "run", callbacks[2], epochs=3).fit(second)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(second.state_dict().values(), whole.state_dict().values(), strict=True))
    assert getattr(callbacks[2], "begun", 3) == 3
