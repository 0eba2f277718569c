"""Trains with numpy alone: each rank trains one member of an ensemble, and all are in one checkpoint.

    ckpt-run -n 4 -- python examples/run_numpy.py numpy-run/checkpoints
    ckpt-run inject kill --rank 2                                             (from another terminal)

Seven lines are about checkpoints.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

import ckpt

FEATURES, SAMPLES, BATCH = 64, 4096, 32


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return points and the side of a hidden plane for each, some of them wrong. They are the same on every rank."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((SAMPLES, FEATURES))
    return x, (x @ generator.standard_normal(FEATURES) + generator.standard_normal(SAMPLES) > 0).astype(np.float64)


def main() -> None:
    """Train, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the checkpoints go: a folder, s3://…")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--seconds", type=float, default=0.005, help="the least duration of a step")
    args = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    x, y = data()
    np.random.seed(rank)  # each member trains on different batches
    weights, velocity = np.random.standard_normal((1, FEATURES)), np.zeros((1, FEATURES))

    def train_step() -> float:
        rows = np.random.randint(0, SAMPLES, BATCH)
        guess = 1 / (1 + np.exp(-x[rows] @ weights[0]))
        velocity[0] = 0.9 * velocity[0] + x[rows].T @ (guess - y[rows]) / BATCH
        weights[0] -= 0.1 * velocity[0]
        time.sleep(args.seconds)
        return float(np.mean((guess > 0.5) != (y[rows] > 0.5)))

    state = {
        "weights": ckpt.Shard(weights, (size, FEATURES), (rank, 0)),  # this rank's row of one matrix
        "velocity": ckpt.Shard(velocity, (size, FEATURES), (rank, 0)),
        "random": ckpt.RandomState(),  # the random generators of each rank
    }
    with ckpt.Checkpointer(args.url, every=args.every, keep=3) as ck:
        state, start = ck.restore(state)  # the newest complete step, the same one on every rank
        for step in range(start, args.steps):
            wrong = train_step()
            if rank == 0 and step % 100 == 0:
                print(f"step {step:5d}  wrong {100 * wrong:5.1f} %")
            ck.step(step, state, loss=wrong)  # sends a heartbeat, and saves in the background when a save is due


if __name__ == "__main__":
    main()
