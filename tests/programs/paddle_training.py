"""A training run with Paddle: Adam, a bfloat16 parameter with SGD, dropout, schedules, gradient scaling, random data.

Usage:

    paddle_training.py REPOSITORY LOSSES [STEP]     killed in the middle of the save of STEP, if it is given

Each loss is one line of LOSSES: the step and the bits of the loss.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import paddle

import ckpt

STEPS = 16


class Model(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(16, 32)
        self.norm = paddle.nn.BatchNorm1D(32)
        self.drop = paddle.nn.Dropout(0.3)
        self.scale = self.create_parameter(
            [32], dtype="bfloat16"
        )  # on the host, of all optimizers SGD alone has kernels for it
        self.last = paddle.nn.Linear(32, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop(paddle.nn.functional.relu(self.norm(self.first(x))))
        return self.last(x * self.scale.astype("float32"))


def main() -> None:
    url, losses = sys.argv[1:3]
    kill = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    if kill < 0 and os.path.exists(url):
        paddle.nn.Linear(2, 2)  # Paddle's counters differ from those of the killed process
    paddle.seed(int(os.getpid()))  # the random numbers come from the restored state
    model = Model()
    schedule = paddle.optimizer.lr.CosineAnnealingWarmRestarts(0.01, 3, 2)
    wide = [parameter for parameter in model.parameters() if parameter is not model.scale]
    optimizer = paddle.optimizer.Adam(schedule, parameters=wide)
    narrow = paddle.optimizer.SGD(paddle.optimizer.lr.ReduceOnPlateau(0.1, patience=1), parameters=[model.scale])
    scaler = paddle.amp.GradScaler(init_loss_scaling=128.0, incr_every_n_steps=4)
    state = {"model": model, "optimizer": optimizer, "narrow": narrow, "scaler": scaler, "random": ckpt.RandomState()}
    with ckpt.Checkpointer(url, every=3) as ck, open(losses, "a") as out:
        state, start = ck.restore(state)
        for step in range(start, STEPS):
            if step == 0:
                paddle.seed(7)
                np.random.seed(7)
                for parameter in model.parameters():
                    parameter.set_value((paddle.randn(parameter.shape) * 0.2).astype(parameter.dtype))
            x = paddle.to_tensor(np.random.randn(8, 16).astype("float32"))
            loss = (model(x) - paddle.randn([8, 4])).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            narrow.step()
            optimizer.clear_grad()
            narrow.clear_grad()
            schedule.step()
            narrow._learning_rate.step(loss)
            out.write(f"{step} {loss.numpy().tobytes().hex()} {optimizer.get_lr().hex()} {narrow.get_lr().hex()}\n")
            out.flush()
            ck.step(step, state)
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
