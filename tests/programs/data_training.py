"""A run for tests of ckpt.training.data_loader: random transforms in workers, random numbers of the loop, equal weights.

Usage:

    data_training.py REPOSITORY RESULT [STEP]       killed after STEP, if it is given
"""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch

import ckpt
import ckpt.training.data_loader


class Shaken:
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([index, random.random(), np.random.rand(), float(torch.rand(()))])


def main() -> None:
    url, result = sys.argv[1:3]
    kill = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    data = ckpt.data.Loader(Shaken(), global_batch=4, seed=5, last="drop", num_workers=1)
    weights = np.zeros(4)
    own = np.zeros(1)
    state: dict[str, Any] = {"w": weights, "own": ckpt.PerRank({"own": own, "random": ckpt.RandomState()}), "data": data}
    seen = []
    random.seed(1)
    with ckpt.Checkpointer(url, every=3) as ck:
        batches = data.forever()
        if kill >= 0:
            next(batches)  # iterators and workers may exist before a restore
            data.load_state_dict({**data.state_dict(), "epoch": 0, "sample": 0, "batch": 0})
        state, start = ck.restore(state)
        for step, batch in zip(range(start, 17), batches, strict=False):
            seen += [sample.numpy() for sample in batch]
            own += random.random() * np.asarray(batch).sum()
            weights += np.sin(step)  # the same on all ranks, as after an all-reduce
            ck.step(step, state)
            if step == kill:
                ck.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    np.savez(f"{result}.npz", weights=np.concatenate([weights, own]), seen=np.array(seen))


if __name__ == "__main__":
    main()
