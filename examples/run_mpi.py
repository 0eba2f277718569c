"""Simulates how heat spreads over a plate that is divided into strips, one for each MPI rank.

    ckpt-run -n 4 --launcher mpiexec --run-dir mpi-run/files -- python examples/run_mpi.py mpi-run/checkpoints

mpiexec starts the ranks, as MPI requires. When one of them dies, ckpt-run starts all ranks again. Any number of ranks can
continue from what another number saved. Five lines are about checkpoints.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from mpi4py import MPI

import ckpt

ROWS, COLUMNS = 192, 128


def main() -> None:
    """Simulate, and save every few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where the checkpoints go: a folder, s3://…")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--seconds", type=float, default=0.002, help="the least duration of a step")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size

    first, end = ROWS * rank // size, ROWS * (rank + 1) // size
    heat = np.zeros((end - first, COLUMNS))
    heat[:, 0] = 100.0  # the left edge stays hot
    above, below = np.zeros(COLUMNS), np.zeros(COLUMNS)  # the rows of the neighbours; cold outside the plate
    up, down = (rank - 1 if rank else MPI.PROC_NULL), (rank + 1 if rank + 1 < size else MPI.PROC_NULL)

    def spread() -> None:
        comm.Sendrecv(heat[0], up, recvbuf=below, source=down)
        comm.Sendrecv(heat[-1], down, recvbuf=above, source=up)
        tall = np.vstack([above, heat, below])
        heat[:, 1:-1] += 0.2 * (tall[:-2, 1:-1] + tall[2:, 1:-1] + heat[:, :-2] + heat[:, 2:] - 4 * heat[:, 1:-1])
        time.sleep(args.seconds)

    state = {"heat": ckpt.Shard(heat, (ROWS, COLUMNS), (first, 0))}  # this rank's rows of the plate
    with ckpt.Checkpointer(args.url, every=args.every, keep=3) as ck:  # all ranks of COMM_WORLD
        state, start = ck.restore(state)  # the newest complete step, the same one on every rank
        for step in range(start, args.steps):
            spread()
            if step % 500 == 0:
                total = comm.reduce(float(heat.sum()))
                if rank == 0:
                    print(f"step {step:5d}  mean {total / ROWS / COLUMNS:.3f} degrees")
            ck.step(step, state)  # sends a heartbeat, and saves in the background when a save is due


if __name__ == "__main__":
    main()
