"""Compares the memory tier with the disk in one run: saves, promotion to the disk, and the restore after a kill.

    python benchmarks/tiers.py                 a state of 512 MiB, /dev/shm and the current folder
    python benchmarks/tiers.py --gib 2 --disk /nvme/bench

Figures of saves are medians without the first two saves, which allocate memory. Loads fill existing arrays, and the loaded
values are compared with the saved ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

import ckpt
from ckpt.storage.local.shared_memory import MemoryStore


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def make(gib: float) -> dict[str, np.ndarray]:
    """Return a state of `gib` GiB."""
    generator = np.random.default_rng(0)
    return {f"layer {i}": generator.standard_normal(int(gib * 2**30 / 80), dtype=np.float32) for i in range(20)}


def change(state: dict[str, np.ndarray], step: int) -> None:
    """Change all values of a state."""
    for array in state.values():
        array[:] = array + np.float32(step)


def saves(title: str, state: dict[str, np.ndarray], run: Path, tiers: list[ckpt.Tier], count: int) -> None:
    """Measure saves, one after the other as in a training loop; with a tier also the promotion to the disk."""
    nbytes = sum(array.nbytes for array in state.values())
    stall, commit, copied = [], [], []
    with ckpt.Checkpointer(run, every=1 if not tiers else None, keep=2, codec="none", tiers=tiers, group=None) as saver:
        for step in range(count):
            change(state, step)
            began = time.perf_counter()
            handle = saver.step(step, state)
            assert handle is not None
            stall.append(time.perf_counter() - began)
            handle.result()
            commit.append(time.perf_counter() - began)
        if tiers:
            saver.save(count, state).result()
            copied.append(seconds(saver.wait))
    done = median(commit[2:])
    print(f"| {title} | {1e3 * median(stall[2:]):.0f} | {1e3 * done:.0f} | {nbytes / done / 1e9:.2f} |")
    if copied:
        print(f"| … promoted to the disk, in the background | | {1e3 * copied[0]:.0f} | {nbytes / copied[0] / 1e9:.2f} |")


def loads(state: dict[str, np.ndarray], run: Path, tiers: list[ckpt.Tier]) -> None:
    """Measure loads as after a kill: the newest step is in memory and on the disk."""
    nbytes = sum(array.nbytes for array in state.values())
    with suppress(RuntimeError), ckpt.Checkpointer(run, every=None, tiers=tiers, codec="none", group=None) as saver:
        saver.save(100, state).result()
        saver.wait()
        raise RuntimeError("the program fails, and the memory stays")
    saved = {name: array.copy() for name, array in state.items()}
    for title in ("restore from memory", "load from the disk, cold"):
        for array in state.values():
            array[:] = 0
        if title.startswith("restore"):
            with ckpt.Checkpointer(run, every=None, tiers=tiers, group=None) as saver:
                took = seconds(lambda: saver.restore(state))
        else:
            for path in run.rglob("*.*"):
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
            took = seconds(lambda: ckpt.load(run, state, group=None))
        assert all(np.array_equal(state[name], saved[name]) for name in saved)
        print(f"| {title} | | {1e3 * took:.0f} | {nbytes / took / 1e9:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--disk", type=Path, default=Path())
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--count", type=int, default=9)
    options = parser.parse_args()
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    disk = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=options.disk))
    memory = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=options.memory))
    os.environ["CKPT_MEMORY"] = str(memory)
    tiers = [ckpt.Tier("memory", every=1, keep=2)]
    state = make(options.gib)
    try:
        print("| | stall ms | ms | GB/s |\n|---|---:|---:|---:|")
        saves("save to the disk", state, disk / "disk", [], options.count)
        saves("save to memory", state, disk / "tiers", tiers, options.count)
        reuse_spare = MemoryStore.reuse_spare
        MemoryStore.reuse_spare = lambda *_: False  # type: ignore[method-assign]
        saves("save to memory, pages not used again", state, disk / "fresh", tiers, options.count)
        MemoryStore.reuse_spare = reuse_spare  # type: ignore[method-assign]
        loads(state, disk / "loads", tiers)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


if __name__ == "__main__":
    main()
