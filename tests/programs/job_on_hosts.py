"""A job for tests of ckpt-run on several hosts: its ranks share 24 rows; each row adds its own numbers.

    job_on_hosts.py FOLDER STEPS SECONDS        CKPT_TEST_SLOW: a factor for the time of a step

With CKPT_TEST_COLUMNS=… rows have that many columns, and each step is saved to memory; every 20th is saved to the repository,
otherwise every 5th, or every CKPT_TEST_EVERY-th.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from last_step import wait_before_last_step
from whole_file import write_whole

import ckpt

ROWS = 24


def main() -> None:
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rank, size, attempt = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["CKPT_ATTEMPT"])
    slow = float(os.environ.get("CKPT_TEST_SLOW", "1"))
    each = ROWS // size
    rows = np.arange(rank * each, (rank + 1) * each)
    wide = int(os.environ.get("CKPT_TEST_COLUMNS", "0"))
    columns = wide or 100
    state = {"w": ckpt.Shard(np.zeros((each, columns)), (ROWS, columns), (rank * each, 0))}
    write_whole(folder / f"pid-{rank}", str(os.getpid()))
    tiers = [ckpt.Tier("memory")] if wide else []
    every = int(os.environ.get("CKPT_TEST_EVERY", "20" if wide else "5"))
    with ckpt.Checkpointer(folder / "repo", every=every, keep=2, tiers=tiers) as ck:
        state, start = ck.restore(state)
        (folder / f"from-{attempt}-{rank}").write_text(str(start))
        for step in range(start, steps):
            wait_before_last_step(folder, step, steps)
            time.sleep(seconds * slow)
            state["w"].local[...] += np.sin(step * 1.7 + rows[:, None])
            (folder / f"at-{attempt}-{rank}").write_text(str(step))
            ck.step(step, state)
        ck.wait()
    np.save(folder / f"end-{rank}.npy", state["w"].local)


if __name__ == "__main__":
    main()
