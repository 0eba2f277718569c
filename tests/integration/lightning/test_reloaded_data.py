"""A Trainer that makes its dataloader again after some epochs continues with the loader of the saved epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lightning_in_process import SAMPLES, SmallModel, small_trainer
from torch.utils.data import DataLoader, TensorDataset


class StatefulLoader:
    """Batches in an order that depends on a seed, and on how many epochs the loader has given."""

    def __init__(self, data: torch.Tensor, seed: int) -> None:
        self.data, self.seed, self.batch = data, seed, 0

    def __len__(self) -> int:
        return SAMPLES // 4

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed))
        for batch in range(self.batch, len(self)):
            self.batch = batch + 1
            if self.batch == len(self):
                self.batch, self.seed = 0, self.seed + 100
            yield [self.data[order[4 * batch : 4 * batch + 4]]]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.batch = state["seed"], state["batch"]


class ReloadingModel(SmallModel):
    """Its data and their order depend on the epoch in which the dataloader is made."""

    stateful = False

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        data = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(epoch))
        if self.stateful:
            return StatefulLoader(data, epoch)
        return DataLoader(TensorDataset(data), 4, shuffle=True, generator=torch.Generator().manual_seed(epoch))


class StatefulModel(ReloadingModel):
    stateful = True


@pytest.mark.parametrize("model", [ReloadingModel, StatefulModel])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("steps", [8, 11, 20])
def test_reloaded_data_are_those_of_the_unbroken_training(tmp_path: Path, model: Any, epochs: int, steps: int) -> None:
    whole, first, second = model(), model(), model()
    options = {"epochs": 4, "reload_dataloaders_every_n_epochs": epochs}
    small_trainer(tmp_path / "whole", **options).fit(whole)
    small_trainer(tmp_path / "run", max_steps=steps, **options).fit(first)
    small_trainer(tmp_path / "run", **options).fit(second)
    assert first.losses + second.losses == whole.losses
