"""The loop of the programs that train on ranks of Paddle, which may kill themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

import ckpt


def train(
    state: Any,
    url: str,
    losses: str,
    kill: int,
    update: Callable[[int], Any],
    restored: Callable[[Any, int], None] | None = None,
) -> None:
    """Restore, and train up to step 8. LOSSES gets the loss of each step. After the step `kill`, wait for the save, and die.

    update: makes the training step with this number, and returns its loss. restored: is called with the state and the number
    of the first step.
    """
    with ckpt.Checkpointer(url, every=2) as saver, open(losses, "a") as out:
        state, start = saver.restore(state)
        if restored:
            restored(state, start)
        for step in range(start, 9):
            out.write(f"{step} {update(step).numpy().tobytes().hex()}\n")
            out.flush()
            saver.step(step, state)
            if step == kill:
                saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)


def minimize(model: Any, optimizer: Any, step: int) -> Any:
    """Make a step of the optimizer on the data with this number, and return the loss."""
    loss = model(paddle.to_tensor(np.random.default_rng(step).standard_normal((4, 8), np.float32))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss
