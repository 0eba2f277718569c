"""Trains a paddle.Model by fit: paddle_fit.py URL LOG KIND [EPOCHS]. LOG gets a line for each batch.

The dataset draws random numbers for each sample, the network has dropout and batch normalization, and an evaluation follows
each epoch. KIND: "dataset", "loader" (of which the order comes from numpy), "accumulate" (two batches for each update), or
"amp".
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import paddle
from paddle import nn

from ckpt.adapters.paddle import Checkpoints

URL, LOG, KIND = sys.argv[1:4]
EPOCHS = int(sys.argv[4]) if len(sys.argv) > 4 else 4
X = np.random.RandomState(0).normal(size=(30, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("int64")


class Rows(paddle.io.Dataset):
    """Rows to which each access adds noise, as an augmentation does."""

    def __getitem__(self, index: int) -> Any:
        noise = 0.0 if KIND == "quiet" else np.random.normal(size=4).astype("float32")
        return X[index] + np.float32(0.1) * noise, Y[index]

    def __len__(self) -> int:
        return len(X)


class Log(paddle.callbacks.Callback):
    """Writes the losses and metrics; slow enough to be killed in the middle."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        rate = self.model._optimizer.get_lr()
        values = [*logs["loss"], logs["acc"], rate]
        with open(LOG, "a") as file:
            file.write(f"{self.epoch * 8 + step} {'/'.join(float(value).hex() for value in values)}\n")
        time.sleep(0.03)


def main() -> None:
    paddle.seed(5)
    np.random.seed(5)
    net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.05, 40)
    model = paddle.Model(net)
    optimizer = paddle.optimizer.Adam(schedule, parameters=net.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    stop = paddle.callbacks.EarlyStopping("loss", patience=EPOCHS, verbose=0, save_best_model=False)
    data = Rows() if KIND != "loader" else paddle.io.DataLoader(Rows(), batch_size=4, shuffle=True)
    accumulate = {"accumulate_grad_batches": 2} if KIND == "accumulate" else {}
    callbacks = [Checkpoints(URL, every=3, keep=2), stop, Log()]
    model.fit(data, Rows(), epochs=EPOCHS, batch_size=4, verbose=0, callbacks=callbacks, **accumulate)
    state = [*net.state_dict().values()]
    total = sum(float(value.astype("float64").sum()) for value in state)
    with open(f"{LOG}.end", "w") as file:
        file.write(f"{total.hex()} {stop.wait_epoch} {float(np.asarray(stop.best_value)).hex()} {np.random.random().hex()}\n")


if __name__ == "__main__":
    main()
