"""A rank for tests of the training loop with a heartbeat page: steps of uneven length, with losses from a file or none.

Usage:

    loop_rank.py FOLDER STEPS SECONDS EVERY [LOSSES]       EVERY: a number of steps, or "auto"

LOSSES is a file of JSON: the losses of the ranks by step ("7"), or of one rank ("1:7").
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ckpt


def main() -> None:
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    every: Any = sys.argv[4] if sys.argv[4] == "auto" else int(sys.argv[4])
    losses = json.loads(Path(sys.argv[5]).read_text()) if len(sys.argv) > 5 else {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    uneven = random.Random(rank)
    state = {"w": ckpt.Shard(np.zeros((500, 100)), (500 * size, 100), (500 * rank, 0)), "step": -1}
    with ckpt.Checkpointer(folder / "repo", every=every, keep=3) as ck:
        state, start = ck.restore(state)
        (folder / f"start-{rank}").write_text(str(start))
        for step in range(start, steps):
            time.sleep(seconds * uneven.uniform(0, 2))
            state["w"].local[...] += np.sin(step + rank)
            state["step"] = step
            loss = 1.0 + 0.01 * uneven.random()
            ck.step(step, state, loss=losses.get(f"{rank}:{step}", losses.get(str(step), loss)))
        ck.wait()


if __name__ == "__main__":
    main()
