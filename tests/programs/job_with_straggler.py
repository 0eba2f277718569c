"""A job for tests of stragglers: rank 2 needs longer for its own part of a step than the others.

    job_with_straggler.py FOLDER SECONDS FACTOR [together] [marked]

together: all ranks wait for each other in every step, by files. marked: the time of their own part is marked as such.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np

import ckpt


def wait_for_all(folder: Path, rank: int, size: int, step: int) -> None:
    with (folder / f"at-{rank}").open("a") as file:
        file.write(".")
    while any(count(folder / f"at-{other}") <= step for other in range(size)):
        time.sleep(0.002)


def count(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def main() -> None:
    folder, seconds, factor = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = {"w": ckpt.Shard(np.zeros((1, 10)), (size, 10), (rank, 0))}
    with ckpt.Checkpointer(every=20, keep=2) as ck:
        state, start = ck.restore(state)
        for step in range(start, 10_000):
            with ckpt.pulse.compute() if "marked" in sys.argv else contextlib.nullcontext():
                time.sleep(seconds * (factor if rank == 2 else 1))
            if "together" in sys.argv:
                wait_for_all(folder, rank, size, step)
            ck.step(step, state)


if __name__ == "__main__":
    main()
