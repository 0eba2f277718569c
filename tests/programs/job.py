"""A job for tests of ckpt-run: it adds numbers that depend on step and rank, and writes the result. Faults by arguments.

Usage:

    job.py FOLDER STEPS SECONDS [FAULT STEP RANK]       the fault happens in the first attempt only, except "always"
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from last_step import wait_before_last_step
from whole_file import write_whole

import ckpt


def main() -> None:
    folder, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    fault, at, faulty_rank = (sys.argv[4], int(sys.argv[5]), int(sys.argv[6])) if len(sys.argv) > 4 else ("", -1, -1)
    rank, size, attempt = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["CKPT_ATTEMPT"])
    state = {"w": ckpt.Shard(np.zeros((4, 100)), (4 * size, 100), (4 * rank, 0))}
    write_whole(folder / f"pid-{rank}", str(os.getpid()))
    if fault == "child" and rank == faulty_rank:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        write_whole(folder / "child", str(child.pid))
    if fault == "always" and rank == faulty_rank:
        raise RuntimeError("there is no data")
    tiers = [ckpt.Tier("memory")] if "CKPT_TEST_TIER" in os.environ else []
    with ckpt.Checkpointer(folder / "repo", every=5 if not tiers else 1000, keep=2, tiers=tiers) as ck:
        state, start = ck.restore(state)
        with (folder / "begun").open("a") as file:
            file.write(f"{start}\n")
        for step in range(start, steps):
            wait_before_last_step(folder, step, steps)
            if fault.startswith("hung-"):
                with ckpt.pulse.phase(fault[5:]):
                    time.sleep(seconds if (step, rank, attempt) != (at, faulty_rank, 0) else 1e6)
            time.sleep(seconds * (10 if fault == "jitter" and step % 7 == rank else 1))
            state["w"].local[...] += np.sin(step * 1.7 + rank)
            if step == at and rank == faulty_rank and (attempt == 0):
                if fault == "raise":
                    raise RuntimeError("a bad batch")
                if fault == "loop":
                    while True:
                        pass
                if fault == "dead-lock":
                    threading.Lock().acquire() and threading.Event().wait()
                if fault == "exit":
                    os._exit(7)
                if fault == "leave":
                    sys.exit(0)
            once = fault == "nan" and attempt == 0
            poisoned = (step, rank) == (at, faulty_rank) and (once or (fault == "poison" and step not in batches_to_skip()))
            ck.step(step, state, loss=float("nan") if poisoned else 1.0)
        ck.wait()
    np.save(folder / f"end-{rank}.npy", state["w"].local)


def batches_to_skip() -> range:
    """Return the batches to skip; one step takes one batch."""
    first, _, last = os.environ.get("CKPT_SKIP", "").partition("-")
    return range(int(first), int(last) + 1) if first else range(0)


if __name__ == "__main__":
    main()
