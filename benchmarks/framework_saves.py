"""Compares saves while a framework trains: by the adapter of ckpt, by a bare Checkpointer, and by the framework itself.

    .venv-frameworks/keras-newest/bin/python benchmarks/framework_saves.py keras [--data FOLDER] [--mib 64] [--rounds 5]

It needs the environment that `make test-framework-keras` makes. The three ways train the same model in turns, in one process,
after one round as warm-up. Printed are medians, with the least and the most:

    stall      how much longer than another step a training step with a save takes
    durable    from the start of a save until its commit record exists; for the framework itself, until its files are fsynced
    processor  the processor time of this process for a save; other programs on the machine change it less than the other two

After a save, the training waits until the save is durable. So the steps without a save are not slowed by it. MIB is the size of
the parameters. Adam's moments take twice as much.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from framework_trainings import EVERY, STEPS, TRAININGS, Way

SAVED = range(EVERY - 1, STEPS - 1, EVERY)
"""The measured saves: the steps, counted from 0, after which a run saves. The save after the last step is not measured."""


@dataclass
class Watch:
    """Measures one training run, which calls it when each step begins."""

    folder: Path
    way: Way
    steps: list[float] = field(default_factory=list)
    """The seconds of each step, including its save."""
    waits: list[float] = field(default_factory=list)
    """The seconds from the end of each save until its files are durable."""
    processor: list[float] = field(default_factory=list)
    """The seconds of processor time of each step, including its save until it is durable."""
    finish: Callable[[], None] = lambda: None
    """Waits for the end of a save that the framework itself makes in the background."""
    _began: float | None = None
    _used: float = 0.0

    def __call__(self) -> None:
        """Note that a step begins; the one before ends here, with its save."""
        now = time.time()
        if self._began is not None:
            if len(self.steps) in SAVED:
                self.waits.append(self._durable_at() - now)
            self.steps.append(now - self._began)
            self.processor.append(time.process_time() - self._used)
        self._used, self._began = time.process_time(), time.time()

    def _durable_at(self) -> float:
        if self.way == "own":
            self.finish()
            for file in (file for file in self.folder.rglob("*") if file.is_file()):
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            return time.time()
        while len(commits := sorted(file.stat().st_mtime for file in self.folder.rglob("commit.json"))) <= len(self.waits):
            time.sleep(0.002)
        return commits[-1]

    def stalls(self) -> list[float]:
        """Return the seconds by which each save made its step longer."""
        return more_than_usual(self.steps)

    def durations(self) -> list[float]:
        """Return the seconds from the start of each save until it was durable."""
        return [stall + wait for stall, wait in zip(self.stalls(), self.waits, strict=True)]


def more_than_usual(seconds: list[float]) -> list[float]:
    """Return by how much each step with a save exceeds the median of the others, of which the first is not counted."""
    usual = statistics.median([each for number, each in enumerate(seconds) if number and number not in SAVED])
    return [seconds[number] - usual for number in SAVED]


def summary(values: list[float]) -> str:
    """Return the median, the least and the most of seconds."""
    return f"{statistics.median(values):7.3f} s ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    """Measure one framework, and print a line for each way and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=TRAININGS)
    parser.add_argument("--data", type=Path, help="the folder for the checkpoints; the default is that for temporary files")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    stalls: dict[Way, list[float]] = {"ckpt": [], "bare": [], "own": []}
    durations: dict[Way, list[float]] = {"ckpt": [], "bare": [], "own": []}
    processor: dict[Way, list[float]] = {"ckpt": [], "bare": [], "own": []}
    for number in range(args.rounds + 1):
        for way in stalls:
            folder = Path(tempfile.mkdtemp(prefix="framework-saves-", dir=args.data))
            watch = Watch(folder, way)
            try:
                TRAININGS[args.framework](way, folder, args.mib, watch)
            finally:
                shutil.rmtree(folder)
            if number:
                stalls[way] += watch.stalls()
                durations[way] += watch.durations()
                processor[way] += more_than_usual(watch.processor)
    print(f"{args.framework}, {3 * args.mib} MiB of parameters and moments, {args.rounds} rounds of {len(SAVED)} saves")
    for way, text in (("ckpt", "the adapter of ckpt"), ("bare", "a bare Checkpointer"), ("own", "the framework itself")):
        print(
            f"{text:<22} stall {summary(stalls[way])}   durable {summary(durations[way])}   processor {summary(processor[way])}"
        )
    fastest = {way: statistics.median(values) for way, values in durations.items()}
    print(
        f"durable rate: {fastest['bare'] / fastest['ckpt']:.2f} x bare, {fastest['own'] / fastest['ckpt']:.2f} x the framework"
    )
    stalled = {way: statistics.median(values) for way, values in stalls.items()}
    print(f"stall: {stalled['ckpt'] / stalled['bare']:.2f} x bare, {stalled['ckpt'] / stalled['own']:.2f} x the framework")


if __name__ == "__main__":
    main()
