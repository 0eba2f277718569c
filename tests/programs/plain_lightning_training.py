"""Trains by a Trainer of Lightning, and knows nothing of ckpt: plain_lightning_training.py LOG.

LOG gets a line for each batch: its number, the loss, and the process.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch

LOG = sys.argv[1]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, number: int) -> Any:
        (x,) = batch
        loss = ((self.layers(x) - x.sum(1, keepdim=True)) ** 2).mean()
        with open(LOG, "a") as file:
            file.write(f"{self.global_step} {loss.item().hex()} {os.getpid()}\n")
        time.sleep(0.05)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    pl.seed_everything(5)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=4, accelerator="cpu", devices=1, **options)
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
