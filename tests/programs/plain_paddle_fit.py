"""Trains by paddle.Model.fit, and knows nothing of ckpt: plain_paddle_fit.py LOG FITS.

LOG gets a line for each batch: its number, the loss, and the process. Each further fit has a model of its own.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import paddle
from paddle import nn

LOG, FITS = sys.argv[1], int(sys.argv[2])
BATCHES, EPOCHS = 8, 3


class Rows(paddle.io.Dataset):
    def __init__(self) -> None:
        self.rows = np.random.RandomState(0).normal(size=(BATCHES * 4, 4)).astype("float32")

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.rows[index, :1]

    def __len__(self) -> int:
        return len(self.rows)


class Log(paddle.callbacks.Callback):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        with open(LOG, "a") as file:
            file.write(f"{self.first + self.epoch * BATCHES + step} {float(logs['loss'][0]).hex()} {os.getpid()}\n")
        time.sleep(0.05)


def train(first: int) -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    model = paddle.Model(net)
    model.prepare(paddle.optimizer.Adam(0.01, parameters=net.parameters()), nn.MSELoss())
    model.fit(Rows(), None, 4, EPOCHS, verbose=0, callbacks=Log(first))
    print("weights", first, float(sum(each.astype("float64").sum() for each in net.state_dict().values())).hex())


def main() -> None:
    paddle.seed(5)
    for number in range(FITS):
        train(1000 * number)


if __name__ == "__main__":
    main()
