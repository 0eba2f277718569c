"""Runs a training program on four ranks under ckpt-run with a fault every few seconds, and shows that it loses nothing.

    python examples/comeback.py

It trains the GPT of fsdp.py once undisturbed, and once with faults: ranks are killed, stopped, run into a busy loop, or raise
an exception. Then it compares the losses of both runs bit for bit. The exit status is 1 if any differs.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from demo import Chapter, Loss, console, read_losses
from rich.markup import escape

import ckpt

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 900
BUSY, BAD = signal.SIGUSR1, signal.SIGALRM


def rank() -> None:
    """Run fsdp.py unchanged, as one rank. Two signals make it fail from inside: by a busy loop or by an exception."""

    def busy(*_: object) -> None:
        while True:
            pass

    def bad(*_: object) -> None:
        raise RuntimeError("a bad batch")

    signal.signal(BUSY, busy)
    signal.signal(BAD, bad)
    random.seed(0)  # fsdp.py seeds only torch; these generators are saved, too, and must be equal in both runs
    np.random.seed(0)
    folder, sys.argv = Path(sys.argv[2]), [str(HERE / "fsdp.py"), *sys.argv[3:]]
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    runpy.run_path(sys.argv[0], run_name="__main__")


class Job:
    """fsdp.py under ckpt-run, which is observed by its losses and by the messages of ckpt-run."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.ranks = folder, args.ranks
        self.log = folder / "losses.jsonl"
        self.messages: list[str] = []
        """The lines that ckpt-run has printed."""
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "ckpt.tools.run", "-n", str(args.ranks), "--run-dir", str(folder / "run")]
        command += ["--hang", "3", "--show", "none", *shlex.split(args.run_options), "--"]
        command += [sys.executable, __file__, "rank", str(folder), str(folder / "checkpoints"), "--losses", str(self.log)]
        command += ["--steps", str(args.steps), "--every", str(args.every), *shlex.split(args.model)]
        self._began = time.monotonic()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _read_messages(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.messages.append(line.strip().removeprefix("ckpt-run: "))

    def losses(self) -> list[Loss]:
        """Return the losses of all steps so far."""
        return read_losses(self.log)

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait until a condition holds; return False if the job has ended before."""
        while not reached():
            if self._process.poll() is not None:
                return False
            if time.monotonic() - self._began > TIMEOUT_SECONDS:
                sys.exit(f"no progress in {TIMEOUT_SECONDS} s; see the logs in {self.folder / 'run' / 'logs'}")
            time.sleep(0.01)
        return True

    def end(self) -> list[Loss]:
        """Wait for the end of the job, and return its losses. End this program if the job failed."""
        self.until(lambda: False)
        self._reader.join()
        if self._process.returncode:
            sys.exit(f"ckpt-run ended with {self._process.returncode}: {' '.join(self.messages[-1:])}")
        return self.losses()

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to ranks."""
        for each in ranks:
            with suppress(ProcessLookupError):  # ckpt-run has already ended the rank, because another is dead
                os.kill(int((self.folder / f"pid-{each}").read_text()), number)


FAULTS: dict[str, tuple[str, Callable[[Job, int], None]]] = {
    "kill": ("rank {} is killed (SIGKILL)", lambda job, one: job.signal(signal.SIGKILL, one)),
    "stop": ("rank {} is stopped (SIGSTOP): it is alive, and does nothing", lambda job, one: job.signal(signal.SIGSTOP, one)),
    "busy": ("rank {} runs into a busy loop; the others wait for it", lambda job, one: job.signal(BUSY, one)),
    "raise": ("rank {} raises an exception", lambda job, one: job.signal(BAD, one)),
    "all": ("all ranks are killed at once", lambda job, one: job.signal(signal.SIGKILL, *range(job.ranks))),
}


def disturbed(chapter: Chapter, job: Job, faults: list[str], seconds: float) -> list[Loss]:
    """Inject one fault after the other, each some seconds after the training has recovered; return all losses."""
    for fault in faults:
        seen, began = len(job.losses()), time.monotonic()
        enough = 12  # after this number of steps, ckpt-run knows how long a step takes
        if not job.until(lambda: len(job.losses()) >= seen + enough and time.monotonic() - began >= seconds):  # noqa: B023
            sys.exit(f"the training ended before {fault!r}: give more --steps")
        one = random.randrange(job.ranks)
        text, inject = FAULTS[fault]
        printed, at = len(job.messages), time.monotonic()
        inject(job, one)
        chapter.event(f"[bold red]{text.format(one)}[/] after step {job.losses()[-1].step}")
        job.until(lambda: len(job.messages) > printed)  # noqa: B023
        for line in job.messages[printed:]:
            chapter.detail(f"ckpt-run: {escape(line)}")
        seen = len(job.losses())
        if job.until(lambda: len(job.losses()) > seen):  # noqa: B023
            chapter.event(f"step {job.losses()[seen].step} is done, {time.monotonic() - at:.1f} s after the fault")
    return job.end()


def compare(expected: list[Loss], found: list[Loss]) -> bool:
    """Print and return whether every loss equals that of the undisturbed run."""
    by_step = {item.step: item for item in expected}
    differ = sum(item != by_step[item.step] for item in found)
    missing = len(by_step.keys() - {item.step for item in found})
    console.print(f"{len(by_step)} steps, and {len(found) - len(by_step) + missing} done again after the faults: ", end="")
    if differ or missing:
        console.print(f"[bold red]{differ} losses differ, {missing} are missing")
    else:
        console.print("[bold green]every loss is equal, bit for bit")
    return not differ and not missing


def compare_checkpoints(expected: Path, found: Path) -> bool:
    """Print and return whether the newest checkpoints of both runs have the same bytes."""
    one, other = (ckpt.open(folder)[ckpt.open(folder).steps()[-1]] for folder in (expected, found))
    equal = list(one) == list(other) and all(np.asarray(one[n]).tobytes() == np.asarray(other[n]).tobytes() for n in one)
    nbytes = sum(leaf.nbytes for leaf in one.leaves())
    console.print(f"The last checkpoints, {len(list(one))} arrays of {nbytes / 1e6:.1f} MB: ", end="")
    console.print("[bold green]equal, bit for bit" if equal else "[bold red]DIFFERENT")
    return equal


def main() -> int:
    """Run the example, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("comeback-run"), help="the folder to work in, which is replaced")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="the faults, in this order")
    parser.add_argument("--seconds", type=float, default=2.0, help="the least seconds of training before the next fault")
    parser.add_argument("--model", default="--width 64 --layers 2", help="more arguments for fsdp.py")
    parser.add_argument("--run-options", default="", help="more arguments for ckpt-run")
    args = parser.parse_args()
    shutil.rmtree(args.dir, ignore_errors=True)
    undisturbed_dir, disturbed_dir = args.dir / "undisturbed", args.dir / "disturbed"
    console.print(f"\nexamples/fsdp.py on {args.ranks} ranks: {args.steps} steps, a checkpoint every {args.every}.\n")
    with Chapter(1, "A training run without faults") as chapter, Job(undisturbed_dir, args) as job:
        expected = job.end()
        chapter.event(f"done: the loss fell from {expected[0].loss:.2f} to {expected[-1].loss:.2f}")
    with Chapter(2, f"The same training with {len(args.faults)} faults") as chapter, Job(disturbed_dir, args) as job:
        found = disturbed(chapter, job, args.faults, args.seconds)
        chapter.event(f"done: step {found[-1].step} was the last")
    with Chapter(3, "Do the two differ?"):
        equal = compare(expected, found)
        equal = compare_checkpoints(undisturbed_dir / "checkpoints", disturbed_dir / "checkpoints") and equal
    with Chapter(4, "Where the time went"):
        command = ["report", "--run-dir", str(disturbed_dir / "run")]
        console.print(f"[bold]$ ckpt-run {shlex.join(command)}")
        done = subprocess.run([sys.executable, "-m", "ckpt.tools.run", *command], check=True, stdout=subprocess.PIPE, text=True)
        console.print(done.stdout, markup=False, soft_wrap=True, end="")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(rank() if sys.argv[1:2] == ["rank"] else main())
