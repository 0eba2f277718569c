"""A job that trains until a file names its last step: long_job.py FOLDER URL SECONDS.

It saves each step to memory and every fifth to URL, and checks what it restores. FOLDER/stop has the number of its last step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from whole_file import write_whole

import ckpt


def main() -> None:
    folder, url, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = {
        "w": ckpt.Shard(np.zeros((4, 100)), (4 * size, 100), (4 * rank, 0)),
        "large": ckpt.Shard(np.zeros(1 << 15), (size << 15,), (rank << 15,)),
    }
    write_whole(folder / f"pid-{rank}", str(os.getpid()))
    with ckpt.Checkpointer(url, every=5, keep=2, tiers=[ckpt.Tier("memory", every=1)]) as ck:
        state, step = ck.restore(state)
        if not (state["large"].local == step).all():
            raise SystemExit(f"step {step - 1} was restored with other values")
        with (folder / "begun").open("a") as file:
            file.write(f"{step}\n")
        while not (folder / "stop").exists() or step <= int((folder / "stop").read_text()):
            time.sleep(seconds)
            state["w"].local[...] += np.sin(step * 1.7 + rank)
            state["large"].local[...] += 1
            ck.step(step, state)
            step += 1
            if rank == 0:
                (folder / "at").write_text(str(step))
        ck.wait()
    np.save(folder / f"end-{rank}.npy", state["w"].local)


if __name__ == "__main__":
    main()
