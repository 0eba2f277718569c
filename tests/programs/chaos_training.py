"""A training run for ckpt-chaos, which kills it at its file events: chaos_training.py FOLDER [plain].

It saves each of its steps, continues from the newest one, and writes its result to FOLDER/result.npy. plain: it saves by
numpy, into the same file each time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ckpt

STEPS = 5


def train(folder: Path, rank: int) -> Any:
    """Train from the newest step, and return the weights."""
    state: dict[str, Any] = {"w": np.zeros((100, 100), np.float32), "random": np.random.default_rng(rank)}
    with ckpt.Checkpointer(folder / "repo", every=1) as ck:
        state, start = ck.restore({"shared": np.zeros(1000), "own": ckpt.PerRank(state)})
        print("resumed from step", max(0, start - 1), flush=True)
        for step in range(max(1, start), STEPS + 1):
            own = state["own"].value
            own["w"] += own["random"].standard_normal((100, 100), np.float32)
            state["shared"] += step
            ck.step(step, state)
    return state["own"].value["w"]


def train_plain(file: Path) -> Any:
    """Do the same with a file that each save replaces in place."""
    w, start = (np.load(file), int(np.load(file)[0])) if file.exists() else (np.zeros(100_000), 0)
    print("resumed from step", start, flush=True)
    for step in range(start + 1, STEPS + 1):
        w[0] = step
        np.save(file, w)
    return w


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    folder.mkdir(exist_ok=True)
    w = train(folder, rank) if len(sys.argv) == 2 else train_plain(folder / "state.npy")
    np.save(folder / f"result-{rank}.npy", w)


if __name__ == "__main__":
    main()
