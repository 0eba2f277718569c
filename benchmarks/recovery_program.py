"""One rank of a job of benchmarks/recovery.py: it runs steps of a given duration, and records the time of each.

SIGUSR1 makes it loop endlessly, and SIGALRM makes it raise an exception. It writes pid-<rank> and times-<rank> in FOLDER. The
lines of the latter are

    begin STEP TIME        the rank starts with this step
    step STEP TIME         this step is done; TIME is by CLOCK_MONOTONIC, which all processes of a host share
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

VALUES = 250_000


def busy(*_: object) -> None:
    """Loop endlessly."""
    while True:
        pass


def bad(*_: object) -> None:
    """Raise an exception."""
    raise RuntimeError("a bad batch")


def main() -> None:
    """Run as one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["numpy", "torch"], default="numpy")
    parser.add_argument("--save", choices=["ckpt", "torch.save", "dcp", "none"], default="ckpt")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--compute", action="store_true", help="steps compute, instead of sleeping")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--jitter", type=float, default=1.0, help="a random factor of a step's duration, from 1 to this")
    parser.add_argument("--long-save", type=float, default=0.0, help="seconds of a stall every 40 steps, as by a save")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    signal.signal(signal.SIGUSR1, busy)
    signal.signal(signal.SIGALRM, bad)
    (args.folder / f"pid-{rank}").write_text(str(os.getpid()))
    times = os.open(args.folder / f"times-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, step: int) -> None:
        os.write(times, f"{what} {step} {time.monotonic():.6f}\n".encode())

    work, state = torch_work() if args.kind == "torch" else numpy_work(rank)

    def train_step() -> None:
        seconds = args.seconds * random.uniform(1, args.jitter)
        if args.compute:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                work()
        else:
            time.sleep(seconds)
            work()

    if args.save == "ckpt":
        with_ckpt(args, state, train_step, note)
    elif args.save == "none":
        note("begin", 0)
        for step in range(args.steps):
            train_step()
            note("step", step)
    else:
        with_torch(args, rank, state, train_step, note)


def numpy_work(rank: int) -> tuple[Callable[[], None], dict[str, Any]]:
    """Return the work of a step and the state. The ranks do not communicate."""
    import ckpt

    size = int(os.environ.get("WORLD_SIZE", "1"))
    w = np.zeros((1, VALUES))

    def work() -> None:
        w[0] += 1.0

    return work, {"w": ckpt.Shard(w, (size, VALUES), (rank, 0))}


def torch_work() -> tuple[Callable[[], None], dict[str, Any]]:
    """Return the work of a step and the state. The ranks wait for each other in every step, as in data parallelism."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    w, gradient = torch.zeros(VALUES), torch.ones(1000)

    def work() -> None:
        dist.all_reduce(gradient)
        w.add_(1.0)

    return work, {"w": w}


def with_ckpt(args: argparse.Namespace, state: Any, train_step: Callable[[], None], note: Callable[[str, int], None]) -> None:
    """Train and save with ckpt.Checkpointer, and write the cost of its `step` to cost-<rank>."""
    import ckpt

    with ckpt.Checkpointer(args.folder / "checkpoints", every=args.every, keep=3) as ck:
        state, start = ck.restore(state)
        note("begin", start)
        spent: list[float] = []
        clock: list[float] = []
        for step in range(start, args.steps):
            train_step()
            if args.long_save and step % 40 == 39:
                with ckpt.pulse.phase("save"):
                    time.sleep(args.long_save)
            if step % 2:
                began = time.perf_counter()
                ck.step(step, state)
                spent.append(time.perf_counter() - began)
            else:  # the cost of reading the clock at this point
                began = time.perf_counter()
                clock.append(time.perf_counter() - began)
                ck.step(step, state)
            note("step", step)
    if spent and clock:
        (args.folder / f"cost-{os.environ.get('RANK', '0')}").write_text(str(median(spent) - median(clock)))


def with_torch(
    args: argparse.Namespace, rank: int, state: Any, train_step: Callable[[], None], note: Callable[[str, int], None]
) -> None:
    """Train and save as torch users do by hand: rank 0 writes a file by torch.save, or all use DCP; a file names the newest."""
    import torch
    import torch.distributed.checkpoint as dcp

    newest, start = args.folder / "newest", 0
    if newest.exists():
        start = int(newest.read_text())
        if args.save == "dcp":
            dcp.load(state, checkpoint_id=str(args.folder / f"dcp-{start}"))
        else:
            state["w"].copy_(torch.load(args.folder / f"file-{start}.pt")["w"])
    note("begin", start)
    for step in range(start, args.steps):
        train_step()
        if (step + 1) % args.every == 0:
            if args.save == "dcp":
                dcp.save(state, checkpoint_id=str(args.folder / f"dcp-{step + 1}"))
            elif rank == 0:
                with (args.folder / f"file-{step + 1}.pt").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            if rank == 0:
                (args.folder / "newest.new").write_text(str(step + 1))
                os.replace(args.folder / "newest.new", newest)
                old = step + 1 - 2 * args.every
                shutil.rmtree(args.folder / f"dcp-{old}", ignore_errors=True)
                (args.folder / f"file-{old}.pt").unlink(missing_ok=True)
        note("step", step)


if __name__ == "__main__":
    main()
