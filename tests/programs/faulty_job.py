"""A job for tests of faults: it adds numbers that depend on step and rank, as job.py does, and saves them to any URL.

    faulty_job.py FOLDER URL STEPS SECONDS FAULT [TIER ...]

FAULT happens in the first attempt: "" none, points:RANK:SPEC (fail points of that rank), memory:RANK:STEP (takes all memory).
TIER: "memory", or a URL or folder. Every step is saved to the first one, every second to the next; every fifth to URL.
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
from ckpt.storage.base.failpoints import set_failpoints


def main() -> None:
    folder, url, steps, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    tiers = [ckpt.Tier(tier, every=1 + i) for i, tier in enumerate(sys.argv[6:])]
    rank, size, attempt = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["CKPT_ATTEMPT"])
    fault, faulty_rank, argument = (*sys.argv[5].split(":", 2), "", "")[:3]
    is_faulty = fault and int(faulty_rank) == rank and attempt == 0
    if is_faulty and fault == "points":
        set_failpoints(argument)
    state = {"w": ckpt.Shard(np.zeros((4, 100)), (4 * size, 100), (4 * rank, 0))}
    write_whole(folder / f"pid-{rank}", str(os.getpid()))
    with ckpt.Checkpointer(url, every=5, keep=2, tiers=tiers) as ck:
        state, start = ck.restore(state)
        with (folder / "begun").open("a") as file:
            file.write(f"{start}\n")
        for step in range(start, steps):
            wait_before_last_step(folder, step, steps)
            time.sleep(seconds)
            state["w"].local[...] += np.sin(step * 1.7 + rank)
            if is_faulty and fault == "memory" and step == int(argument):
                Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel kills this process first
                taken = [np.ones(1 << 27) for _ in range(16)]
                raise SystemExit(f"{len(taken)} GiB were not too much")
            ck.step(step, state)
        ck.wait()
    np.save(folder / f"end-{rank}.npy", state["w"].local)


if __name__ == "__main__":
    main()
