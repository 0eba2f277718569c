"""A training run by Model.train or Model.fit of MindSpore with the callback of ckpt.

Usage:

    mindspore_model_training.py REPOSITORY LOG MODE [EPOCHS]

MODE: pynative or graph (Model.fit with validation and other callbacks), or scaled (Model.train with a loss scale, and a network
that computes its loss).
Each line of LOG is a step and the bits of its loss. LOG.end gets what the other callbacks have counted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("GLOG_v", "3")

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import amp, nn, ops
from mindspore.train import Callback, EarlyStopping, History, Model, ReduceLROnPlateau

from ckpt.adapters.mindspore import Checkpoints, resumable_dropout

EPOCHS = 6
BATCH = 4
ROWS = 20


class Net(nn.Cell):
    def __init__(self, computes_loss: bool) -> None:
        super().__init__()
        self.first = nn.Dense(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(p=0.3)
        self.last = nn.Dense(8, 2)
        self.computes_loss = computes_loss

    def construct(self, x: Any, y: Any = None) -> Any:
        x = self.last(self.drop(ops.relu(self.norm(self.first(x)))))
        return ((x - y) ** 2).mean() if self.computes_loss else x


class Log(Callback):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = open(path, "a")

    def on_train_step_end(self, run_context: Any) -> None:
        arguments = run_context.original_args()
        outputs = arguments.net_outputs
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        self._file.write(f"{arguments.cur_step_num - 1} {float(loss.asnumpy()).hex()}\n")
        self._file.flush()


def dataset(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    rows = {"x": draw.standard_normal((ROWS, 6)).astype(np.float32), "y": draw.standard_normal((ROWS, 2)).astype(np.float32)}
    return ds.NumpySlicesDataset(rows, shuffle=True).batch(BATCH)


def main() -> None:
    url, log, mode = sys.argv[1:4]
    epochs = int(sys.argv[4]) if len(sys.argv) > 4 else EPOCHS
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(7)
    net = resumable_dropout(Net(mode == "scaled"))
    saving = Checkpoints(url, every=2)
    if mode == "scaled":
        optimizer = nn.Momentum(net.trainable_params(), nn.CosineDecayLR(0.001, 0.05, 30), 0.9)
        model = Model(net, None, optimizer, loss_scale_manager=amp.FixedLossScaleManager(1024, False))
        model.train(epochs, dataset(1), callbacks=[saving, Log(log)])
        return
    model = Model(net, nn.MSELoss(), nn.Adam(net.trainable_params(), 0.05), metrics={"mae": nn.MAE()})
    plateau = ReduceLROnPlateau(monitor="eval_loss", patience=1, factor=0.5)
    history = History()
    others = [plateau, EarlyStopping("eval_loss", patience=50), history]
    model.fit(epochs, dataset(1), dataset(2), callbacks=[saving, *others, Log(log)])
    with open(f"{log}.end", "w") as out:
        out.write(f"{history.history} {plateau.best} {plateau.wait} {model._optimizer.learning_rate.asnumpy()}\n")


if __name__ == "__main__":
    main()
