"""Instruments: what the disk holds, what the process holds, how long a training step takes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import psutil

SAMPLE_SECONDS = 0.02


def files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def fsync_files(folder: Path) -> None:
    for file in files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_cache(folder: Path) -> None:
    """Make the next read of these files come from the disk. Dirty pages would stay: they are written first."""
    fsync_files(folder)
    for file in files(folder):
        drop_file(file)


def drop_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in files(folder))


class PeakMemory:
    """Samples the resident memory of this process in a `with` block; `nbytes` is its peak above the start.

    Only this process: none of the peers starts another, and looking for children costs 1 ms under the interpreter's
    lock, 50 times a second, from the very saves that are timed meanwhile.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory")

    def __enter__(self) -> PeakMemory:
        self._start = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, self._process.memory_info().rss - self._start)
            if self._stop.wait(SAMPLE_SECONDS):
                return


QUIET_STEPS = 100


def quiet_step_seconds() -> float:
    """The mean time of a training step with nothing beside it."""
    return step_seconds(lambda steps: steps >= QUIET_STEPS)


def step_seconds(until: Callable[[int], bool]) -> float:
    """The mean time of training steps, made until `until(their number)` holds; at least one."""
    step = training_step()
    times = []
    while True:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        if until(len(times)):
            return mean(times)


def training_step() -> Callable[[], None]:
    """Some milliseconds of matrix products on one thread, so that a save finds a core where there are two."""
    import torch

    torch.set_num_threads(1)
    weight = torch.randn(384, 384)

    def step() -> None:
        value = weight
        for _ in range(8):
            value = torch.tanh(value @ weight)

    return step
