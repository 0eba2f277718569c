"""A training run with MindSpore: dropout, norm, an optimizer with a schedule, loss scaling, shuffled data, random noise.

Usage:

    mindspore_training.py REPOSITORY LOG MODE [OPTIMIZER]

MODE: pynative, graph, or jit (PyNative mode with a compiled step).
OPTIMIZER: adam (of mindspore.nn), momentum (with a schedule that is a list), or adamw (of mindspore.experimental).
Each line of LOG is a step and the bits of its loss.
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
from mindspore.experimental import optim

import ckpt
from ckpt.adapters.mindspore import resumable_dropout

STEPS = 24
BATCH = 4
ROWS = 20


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(p=0.3)
        self.scale = ms.Parameter(ms.Tensor(np.ones(8), ms.bfloat16), name="scale", requires_grad=False)
        self.last = nn.Dense(8, 2)

    def construct(self, x: Any) -> Any:
        x = self.drop(ops.relu(self.norm(self.first(x))))
        return self.last(x * self.scale.astype(ms.float32))


def optimizer_of(kind: str, net: Net) -> tuple[Any, Any]:
    """Return an optimizer and its schedule; None where the optimizer computes its rate itself."""
    if kind == "momentum":
        return nn.Momentum(net.trainable_params(), [0.1 / (step + 1) for step in range(STEPS)], 0.9), None
    if kind == "adamw":
        optimizer = optim.AdamW(net.trainable_params(), lr=0.05)
        return optimizer, optim.lr_scheduler.StepLR(optimizer, 3)
    return nn.Adam(net.trainable_params(), nn.CosineDecayLR(0.001, 0.05, STEPS)), None


def main() -> None:
    url, log, mode = sys.argv[1:4]
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(7)
    net = resumable_dropout(Net().set_train())
    optimizer, schedule = optimizer_of(sys.argv[4] if len(sys.argv) > 4 else "adam", net)
    scaler = amp.DynamicLossScaler(1024, 2, 5)
    rows = np.random.default_rng(0).standard_normal((ROWS, 6)).astype(np.float32)
    data = ds.NumpySlicesDataset({"x": rows}, shuffle=True).batch(BATCH)
    batches = data.create_dict_iterator(num_epochs=STEPS * BATCH // ROWS + 1)

    def forward(x: Any, y: Any) -> Any:
        return scaler.scale(((net(x) - y) ** 2).mean())

    gradient = ms.value_and_grad(forward, None, optimizer.parameters)

    def train_step(x: Any, y: Any) -> Any:
        loss, gradients = gradient(x, y)
        gradients = scaler.unscale(gradients)
        scaler.adjust(amp.all_finite(gradients))
        return ops.depend(scaler.unscale(loss), optimizer(gradients))

    if mode == "jit":
        train_step = ms.jit(train_step)
    state = {
        "net": net, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "batches": batches,
        "random": ckpt.RandomState(),
    }  # fmt: skip
    with ckpt.Checkpointer(url, every=2) as saver, open(log, "a") as out:
        state, start = saver.restore(state)
        for step in range(start, STEPS):
            batch = next(batches, None) or next(batches)
            noise = ops.randn(BATCH, 2) if mode != "graph" else ms.Tensor(np.random.randn(BATCH, 2).astype(np.float32))
            loss = train_step(batch["x"], noise)
            if schedule is not None:
                schedule.step()
            out.write(f"{step} {float(loss.asnumpy()).hex()}\n")
            out.flush()
            saver.step(step, state)


if __name__ == "__main__":
    main()
