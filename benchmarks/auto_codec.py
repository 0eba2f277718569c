"""Compares durable saves with codec="auto" to saves without a codec, on a disk of any speed.

    python benchmarks/auto_codec.py FOLDER [--mb-per-second N] [--mib N] [--rounds N]

With --mb-per-second, writes to the disk of FOLDER are limited to that speed, for the processes of this script only, by a
control group (root is needed). Each round runs each case once, in a new process: one save from which `auto` learns the speeds,
and then three saves of changed data, of which the median counts. The script prints medians over the rounds, and the median of
the ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from disk_limits import DiskSpeed, limited_disk

STATES = ("bf16 weights", "mixed precision")


def make_state(kind: str, mib: int) -> dict[str, np.ndarray]:
    """Return arrays whose exponents are distributed as those of a model in training: weights, and moments of Adam."""
    rng = np.random.default_rng(0)
    parameters = (mib << 20) // (2 if kind == "bf16 weights" else 14)
    weights = 0.02 * rng.standard_normal(parameters, dtype=np.float32)
    state: dict[str, np.ndarray] = {"weights": weights.astype(ml_dtypes.bfloat16)}
    if kind == "mixed precision":
        scales = np.exp(2 * rng.standard_normal(parameters, dtype=np.float32))
        state |= {
            "master": weights,
            "exp_avg": 1e-4 * scales * rng.standard_normal(parameters, dtype=np.float32),
            "exp_avg_sq": 1e-8 * np.square(scales),
        }
    return state


def save_child(folder: str, kind: str, mib: int, codec: str) -> None:
    """Save four times; print the seconds, the stored share, and what was chosen, as JSON."""
    import ckpt  # with `auto`, in the process that saves only

    state = make_state(kind, mib)
    seconds, choices = [], []
    for step in range(4):
        for array in state.values():
            array[::1000] *= array.dtype.type(1.5)  # no block stays as it is
        began = time.perf_counter()
        commit = ckpt.save(state, folder, step=step, codec=codec, keep=1).commit
        seconds.append(time.perf_counter() - began)
        choices = [json.loads(c.codec)["id"] if c.codec else "none" for c in commit.codec_choices]
    print(json.dumps([statistics.median(seconds[1:]), commit.written_bytes / commit.raw_bytes, choices]))


@contextmanager
def limited_writes(folder: Path, bytes_per_second: int | None) -> Iterator[list[Path]]:
    """Yield the files to which a process writes its number to be limited."""
    if bytes_per_second is None:
        yield []
        return
    with limited_disk(folder, DiskSpeed(write_bytes=bytes_per_second)) as disk:
        yield [disk.processes]


def run_child(folder: Path, case: tuple[str, int, str], groups: list[Path]) -> Any:
    """Run `save_child` in a new process, and return what it printed."""
    kind, mib, codec = case
    shutil.rmtree(folder, ignore_errors=True)
    code = f"import auto_codec; auto_codec.save_child({str(folder)!r}, {kind!r}, {mib}, {codec!r})"

    def join() -> None:
        for file in groups:
            file.write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=join
    )
    shutil.rmtree(folder, ignore_errors=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print one line for each kind of state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mb-per-second", type=float)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    limit = None if args.mb_per_second is None else round(args.mb_per_second * 1e6)
    print("| state | none GB/s | auto GB/s | auto / none | least | most | stored | chosen |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    with limited_writes(args.folder, limit) as groups:
        for kind in STATES:
            rounds = []
            for number in range(args.rounds):
                codecs = ("none", "auto") if number % 2 == 0 else ("auto", "none")
                rounds.append({codec: run_child(args.folder / "r", (kind, args.mib, codec), groups) for codec in codecs})
            speeds = {c: statistics.median((args.mib << 20) / r[c][0] / 1e9 for r in rounds) for c in ("none", "auto")}
            ratios = [r["none"][0] / r["auto"][0] for r in rounds]
            stored, chosen = rounds[-1]["auto"][1:]
            figures = (*speeds.values(), statistics.median(ratios), min(ratios), max(ratios), stored)
            cells = [kind, *(f"{figure:.2f}" for figure in figures), ", ".join(chosen) or "none"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
