"""A training run with one batch that spoils the weights: the loss of that step is still good, the weights are not.

Usage:

    spoiled_training.py REPOSITORY STEPS BATCH
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import ckpt
import ckpt.training.data_loader


def main() -> None:
    url, steps, spoils = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    data = ckpt.data.Stream(lambda epoch: range(20 * epoch, 20 * epoch + 20), global_batch=2)
    state: dict[str, Any] = {"w": np.zeros(3), "data": data}
    with ckpt.Checkpointer(url, every=1, keep=8) as ck:
        state, start = ck.restore(state)
        for step, batch in zip(range(start, steps), data.forever(), strict=False):
            loss = float(state["w"].sum())
            state["w"] += np.nan if data.batch == spoils else np.sin(batch).sum()
            ck.step(step, state, loss=loss)


if __name__ == "__main__":
    main()
