"""A small model of Lightning, and Trainers of it that run in the process of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt.adapters.lightning import Checkpoints

SAMPLES = 32


class SmallModel(pl.LightningModule):
    """A linear layer on shuffled data; `losses` has the epoch, the step, the loss and the learning rate of each batch."""

    def __init__(self, seed: int = 1, lr: float = 0.01, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.lr, self.batch_size = torch.nn.Linear(3, 1), lr, batch_size
        self.losses: list[tuple[int, int, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        loss = ((self.layer(x) - x.sum(1, keepdim=True)) ** 2).mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.losses.append((self.current_epoch, self.global_step, loss.item(), rate))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(3)))
        return DataLoader(data, self.batch_size, shuffle=True, generator=torch.Generator().manual_seed(5))


def small_trainer(url: Path | None, *callbacks: Any, epochs: int = 2, every: int = 1, **options: Any) -> pl.Trainer:
    """Return a Trainer on the CPU that saves to `url` after the other callbacks; without one, it saves nowhere."""
    saving = [] if url is None else [Checkpoints(url, every=every)]
    return pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=bool(saving),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, *saving], **options,
    )  # fmt: skip
