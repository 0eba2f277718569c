"""Measures one call of Checkpointer.step when no save is due.

    python benchmarks/step.py [--calls 20000]

It prints the microseconds of a call (the median of rounds, and the slowest round), and the share of a step of 10 ms. It also
measures a mark of a part of the step by `with ckpt.pulse.compute():`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import ckpt
from ckpt.training import heartbeat_marks, heartbeat_page
from ckpt.training.heartbeat_page import HeartbeatPage

EVERY = {"every=10**9": 10**9, "every=1 h": timedelta(hours=1), 'every="auto"': "auto"}
ROUNDS = 20


def one_rank(folder: Path, every: str, loss_kind: str, calls: int) -> None:
    """Run as one rank in a process of its own. Rank 0 prints three numbers: the median, the slowest round, and a mark."""
    loss: object = 1.5
    if loss_kind == "torch":
        import torch

        loss = torch.tensor(1.5, requires_grad=True) * 1.0
    import numpy as np

    state = {"w": np.zeros(1000)}
    with ckpt.Checkpointer(folder / "repo", every=EVERY[every]) as ck:  # type: ignore[arg-type]
        ck.save(0, state, blocking=True).result()
        for step in range(1, 200):
            ck.step(step, state, loss=loss)
        rounds, count = [], calls // ROUNDS
        for number in range(ROUNDS):
            began = time.perf_counter()
            for step in range(200 + number * count, 200 + (number + 1) * count):
                ck.step(step, state, loss=loss)
            rounds.append((time.perf_counter() - began) / count * 1e6)
        began = time.perf_counter()
        for _ in range(calls):
            with heartbeat_marks.compute():
                pass
        marking = (time.perf_counter() - began) / calls * 1e6
    if os.environ.get("RANK", "0") == "0":
        print(statistics.median(rounds), max(rounds), marking)


def measure(every: str, loss: str, pulse: bool, ranks: int, spikes: bool, calls: int) -> list[float]:
    """Return the microseconds of a call on rank 0: the median and the slowest round, and those of a mark.

    The other ranks are processes that do the same.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for rank in range(ranks):
            environ = dict(os.environ)
            for key in ("RANK", "WORLD_SIZE", heartbeat_page.PAGE_VARIABLE):
                environ.pop(key, None)
            if ranks > 1:
                environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "CKPT_RUN_ID": name}
            if pulse:
                HeartbeatPage(folder / f"page-{rank}", new=True).close()
                environ[heartbeat_page.PAGE_VARIABLE] = str(folder / f"page-{rank}")
            if spikes:
                environ["CKPT_SPIKE"] = "10"
            command = [sys.executable, __file__, "--rank", name, every, loss, "--calls", str(calls)]
            processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"a rank has failed: {every}, {loss}")
        return [float(each) for each in outputs[0].split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rank", nargs=3, metavar=("FOLDER", "EVERY", "LOSS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, every, loss = options.rank
        one_rank(Path(folder), every, loss, options.calls)
        return
    columns = f"{'ranks':>5} {'µs a call':>10} {'slowest':>8} {'of 10 ms':>9} {'a mark':>8}"
    print(f"{'':14} {'loss':6} {'under ckpt-run':18} {columns}")
    for ranks in (1, 4):
        for every in EVERY:
            for under, pulse, spikes in (("no", False, False), ("yes", True, False), ("yes, --spike", True, True)):
                for loss in ("float", "torch"):
                    median, slowest, mark = measure(every, loss, pulse, ranks, spikes, options.calls)
                    share = f"{median / 100:8.3f} %"
                    print(f"{every:14} {loss:6} {under:18} {ranks:5} {median:10.2f} {slowest:8.2f} {share:>9} {mark:8.2f}")


if __name__ == "__main__":
    main()
