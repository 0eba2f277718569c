"""Functions that measure files, the page cache, the memory of this process, and the time of a training step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean

import psutil

SAMPLE_SECONDS = 0.02


def files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder."""
    return (file for file in folder.rglob("*") if file.is_file())


def fsync_files(folder: Path) -> None:
    """Make all files below a folder durable."""
    for file in files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_cache(folder: Path) -> None:
    """Drop files from the page cache, so that the next read is from the disk. Dirty pages are written first."""
    fsync_files(folder)
    for file in files(folder):
        drop_file(file)


def drop_file(file: Path) -> None:
    """Drop one file from the page cache. Three times, because the kernel keeps a page that it moves at that moment."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    for _ in range(3):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(0.01)
    os.close(descriptor)


def stored_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in files(folder))


class PeakMemory:
    """Samples the resident memory of this process in a `with` block; `nbytes` is the peak above the start.

    helper_pids: returns the ids of other processes that work for this one; their own memory counts, too. The memory that they
        share with this process counts once. To look for all children of this process would take 1 ms with the interpreter
        lock, 50 times a second, and slow the timed saves.
    """

    def __init__(self, helper_pids: Callable[[], Iterable[int]] = tuple) -> None:
        self.nbytes = 0
        self._process = psutil.Process()
        self._helper_pids = helper_pids
        self._helpers: dict[int, psutil.Process] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory")

    def __enter__(self) -> PeakMemory:
        self._start = self._resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, self._resident_bytes() - self._start)
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def _resident_bytes(self) -> int:
        total: int = self._process.memory_info().rss
        for pid in self._helper_pids():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if pid not in self._helpers:
                    self._helpers[pid] = psutil.Process(pid)
                info = self._helpers[pid].memory_info()
                total += info.rss - info.shared
        return total


QUIET_STEPS = 100


def quiet_step_seconds() -> float:
    """Return the mean time of a training step while nothing else runs."""
    return step_seconds(lambda steps: steps >= QUIET_STEPS)


def step_seconds(until: Callable[[int], bool]) -> float:
    """Return the mean time of training steps. At least one runs, until `until(number of steps)` is true."""
    step = training_step()
    times = []
    while True:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        if until(len(times)):
            return mean(times)


def training_step() -> Callable[[], None]:
    """Return a training step: some milliseconds of matrix products in one thread, so that a save can use a second core."""
    import torch

    torch.set_num_threads(1)
    weight = torch.randn(384, 384)

    def step() -> None:
        value = weight
        for _ in range(8):
            value = torch.tanh(value @ weight)

    return step
