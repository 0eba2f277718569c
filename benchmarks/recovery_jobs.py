"""The jobs of recovery.py: a program under a launcher, the faults that occur to it, and its recoveries."""

from __future__ import annotations

import argparse
import math
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ckpt

PROGRAM = str(Path(__file__).resolve().parent / "recovery_program.py")
WARM, COLD = "ckpt-run", "ckpt-run --cold"
"""Launchers: with warm starts, where a fault waits until the next start is a warm one; and without warm starts."""
STEPS_BEFORE = 25
"""The least number of steps between two faults: ckpt-run learns the duration of a step, and a newer step is saved."""


class Job:
    """The program under a launcher, which is observed by the files that it writes."""

    def __init__(self, launcher: list[str], folder: Path, ranks: int, program: list[str]) -> None:
        self.folder, self.ranks = folder, ranks
        self.process = subprocess.Popen(
            [*launcher, PROGRAM, str(folder), *program], start_new_session=True,
            stdout=(folder / "stdout").open("ab"), stderr=(folder / "stderr").open("ab"),
        )  # fmt: skip

    def times(self, rank: int) -> list[tuple[str, int, float]]:
        """Return all complete lines of a rank: what, step, time."""
        try:
            text = (self.folder / f"times-{rank}").read_text()
        except FileNotFoundError:
            return []
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(what, int(step), float(at)) for what, step, at in lines]

    def pids(self) -> list[int]:
        """Return the process ids of the ranks."""
        return [int((self.folder / f"pid-{rank}").read_text()) for rank in range(self.ranks)]

    def steps_since(self, moment: float) -> list[tuple[int, list[tuple[int, float]]]]:
        """Return for each rank the step with which it last began after a moment, or -1, and the steps that it did since."""
        found = []
        for rank in range(self.ranks):
            begun, done = -1, []
            for what, step, at in self.times(rank):
                if at <= moment:
                    continue
                if what == "begin":
                    begun, done = step, []
                elif begun >= 0:
                    done.append((step, at))
            found.append((begun, done))
        return found

    def until_steps(self, count: int, moment: float, patience: float) -> bool:
        """Wait until every rank began after a moment and did `count` steps; return False after `patience` seconds."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if all(len(done) >= count for _, done in self.steps_since(moment)):
                return True
            if self.process.poll() is not None:
                raise SystemExit(f"the job has ended: {(self.folder / 'stderr').read_text()[-2000:]}")
            time.sleep(0.05)
        return False

    def end(self) -> None:
        """End the launcher and its ranks."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    continue
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@contextmanager
def job(args: argparse.Namespace, launcher: str, *program: str) -> Iterator[Job]:
    """A context with a running job in a new folder. program: arguments of the program."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-recovery-", dir=args.data))
    started = Job(LAUNCHERS[launcher](args, folder), folder, args.ranks, list(program))
    try:
        yield started
    finally:
        started.end()
        shutil.rmtree(folder, ignore_errors=True)


def ckpt_run(args: argparse.Namespace, folder: Path, *options: str) -> list[str]:
    """Return the command line of ckpt-run up to the program."""
    own = ["-n", str(args.ranks), "--run-dir", str(folder / "run"), "--show", "none"]
    return [sys.executable, "-m", "ckpt.tools.run", *own, *options, *shlex.split(args.run_options), "--", sys.executable]


LAUNCHERS: dict[str, Callable[[argparse.Namespace, Path], list[str]]] = {
    WARM: lambda args, folder: ckpt_run(args, folder),
    COLD: lambda args, folder: ckpt_run(args, folder, "--cold"),
    # Without the variable, new ranks find the addresses of the old ones in the store of torchrun 2.13, and gloo fails.
    "torchrun": lambda args, folder: [
        "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
        str(args.ranks), "--standalone", "--max-restarts", "1000",
    ],
    "bare": lambda args, folder: [sys.executable],
}  # fmt: skip

FAULTS = {
    "kill": ("kill -9 of one rank", signal.SIGKILL),
    "raise": ("an exception in one rank", signal.SIGALRM),
    "stop": ("SIGSTOP of one rank", signal.SIGSTOP),
    "busy": ("a busy loop in one rank", signal.SIGUSR1),
    "all": ("kill -9 of all ranks", signal.SIGKILL),
}


@dataclass(frozen=True, slots=True)
class Comeback:
    """The recovery of a job from one fault."""

    noticed_seconds: float
    next_step_seconds: float
    """Infinite if the job did not recover."""
    redone_steps: int
    lost_commits: int


def inject(job: Job, fault: str, patience: float) -> Comeback:
    """Make ranks of a running job fail, and wait for the next step of every rank, for at most `patience` seconds."""
    pids = job.pids()
    files = [os.pidfd_open(pid) for pid in pids]
    try:
        saved, one = newest(job), random.randrange(len(pids))
        began = time.monotonic()
        for file in files if fault == "all" else files[one : one + 1]:
            with suppress(ProcessLookupError):  # the launcher has already ended the rank, because the first is dead
                signal.pidfd_send_signal(file, FAULTS[fault][1])
        others = [file for number, file in enumerate(files) if number != one]
        ended, *_ = select.select(others, [], [], patience)
        noticed = time.monotonic() - began if ended else math.inf
    finally:
        for file in files:
            os.close(file)
    if not job.until_steps(1, began, patience):
        return Comeback(noticed, math.inf, 0, 0)
    found = job.steps_since(began)
    before = min(
        max((step for what, step, at in job.times(rank) if what == "step" and at <= began), default=-1)
        for rank in range(job.ranks)
    )
    start = max(begun for begun, _ in found)
    again = max(done[0][1] for _, done in found) - began
    return Comeback(noticed, again, before + 1 - start, max(0, saved + 1 - start))


def newest(job: Job) -> int:
    """Return the newest committed step, or -1."""
    if (job.folder / "newest").exists():
        return int((job.folder / "newest").read_text()) - 1
    try:
        return max(ckpt.open(job.folder / "checkpoints").steps(), default=-1)
    except ckpt.CkptError:
        return -1


def series(args: argparse.Namespace, launcher: str, fault: str, *program: str) -> list[Comeback]:
    """Inject the same fault `--repeat` times in one job, or until the job does not recover; return all recoveries."""
    found: list[Comeback] = []
    with job(args, launcher, *program) as running:
        moment = 0.0
        while len(found) < args.repeat:
            if not running.until_steps(STEPS_BEFORE, moment, args.patience):
                raise SystemExit(f"{launcher} {shlex.join(program)} did not start: see {running.folder}/stderr")
            while launcher == WARM and not is_warm(running.folder):
                time.sleep(0.2)
            moment = time.monotonic()
            found.append(inject(running, fault, args.patience))
            if not math.isfinite(found[-1].next_step_seconds):
                break
    return found


def is_warm(folder: Path) -> bool:
    """Return whether the next start is a warm one."""
    status = [sys.executable, "-m", "ckpt.tools.run", "status", "--run-dir", str(folder / "run")]
    return "the next start is warm" in subprocess.run(status, capture_output=True, text=True, check=False).stdout
