"""The program of `make demo`: kills a training run in the middle of a save, and shows that nothing is lost.

It trains the GPT of train.py once undisturbed, and once with two kills (SIGKILL, which no program can catch). Then it compares
the losses of both runs bit for bit. The exit status is 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

import ckpt

STEPS, EVERY = 300, 30
KILLED_SAVE = 4  # the number of the save during which the first kill happens
TIMEOUT_SECONDS = 600

console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


@dataclass(frozen=True, slots=True)
class Loss:
    """What train.py logs for one step."""

    step: int
    loss: float
    bits: str


class Training:
    """A running train.py, which is observed by its log, its folder and its process id."""

    def __init__(self, folder: Path, log: Path, failpoints: str = "") -> None:
        self.folder, self._log = folder, log
        self._errors = log.with_suffix(".stderr")
        self._skip = len(read_losses(log))
        self._began = time.monotonic()
        command = [sys.executable, str(Path(__file__).with_name("train.py")), str(folder), "--log", str(log)]
        command += ["--steps", str(STEPS), "--every", str(EVERY)]
        with open(self._errors, "wb") as errors:
            environment = os.environ | {"CKPT_FAILPOINTS": failpoints}
            self._process = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def losses(self) -> list[Loss]:
        """Return the losses of this process, without those of earlier ones."""
        return read_losses(self._log)[self._skip :]

    def watch(self, until: int | None = None, exists: Path | None = None) -> list[Loss]:
        """Show the progress until step `until` is done and the path `exists` exists, or until the process ends.

        Returns the losses.
        """
        with console.status("starting …") as status:
            while time.monotonic() - self._began < TIMEOUT_SECONDS:
                ended = self._process.poll() is not None
                losses = self.losses()
                if losses:
                    status.update(f"step {losses[-1].step} of {STEPS}, loss {losses[-1].loss:.3f}")
                    if until is not None and losses[-1].step >= until and (exists is None or exists.exists()):
                        return losses
                if ended:
                    if self._process.returncode or until is not None:
                        self._exit(f"train.py ended with {self._process.returncode}")
                    return losses
                time.sleep(0.02)
        self._exit(f"train.py made no progress in {TIMEOUT_SECONDS} s")

    def kill(self) -> list[Loss]:
        """Kill the process by SIGKILL, check that this ended it, and return the losses."""
        os.kill(self._process.pid, signal.SIGKILL)
        if self._process.wait() != -signal.SIGKILL:
            self._exit(f"train.py ended with {self._process.returncode} before it was killed")
        return self.losses()

    def _exit(self, message: str) -> NoReturn:
        console.print(f"[bold red]{message}[/]. Its output:")
        console.print(self._errors.read_text()[-4000:], markup=False)
        sys.exit(1)


def read_losses(log: Path) -> list[Loss]:
    """Return the losses in all complete lines of a log."""
    text = log.read_text() if log.exists() else ""
    return [Loss(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def committed(folder: Path) -> str:
    """Return the numbers of the committed steps as text."""
    return ", ".join(map(str, ckpt.open(folder).steps())) or "none"


class Chapter:
    """Prints a heading, and then lines with the seconds since its start."""

    def __init__(self, number: int, title: str) -> None:
        console.print(Rule(f"[bold]{number}  {title}", align="left"))
        self._began = time.monotonic()

    def __enter__(self) -> Chapter:
        return self

    def __exit__(self, *_: object) -> None:
        console.print()

    def event(self, text: str) -> None:
        """Print a line with the time."""
        console.print(f"[dim]{time.monotonic() - self._began:7.1f} s[/]  {text}")

    def detail(self, text: str) -> None:
        """Print a line without the time."""
        console.print(f"           [dim]{text}")


# --- the parts of the demo -----------------------------------------------------------------------------------------


def undisturbed(chapter: Chapter, folder: Path, log: Path) -> list[Loss]:
    """Train without a kill, and return the losses."""
    with Training(folder, log) as training:
        losses = training.watch()
    chapter.event(f"done: {len(losses)} steps, the loss fell from {losses[0].loss:.2f} to {losses[-1].loss:.2f}")
    return losses


def killed_in_a_save(chapter: Chapter, folder: Path, log: Path) -> list[Loss]:
    """Stop a save at a fail point after its data and before its commit, and kill the training; return the losses."""
    step = KILLED_SAVE * EVERY - 1
    saved = folder / "steps" / str(step)
    chapter.event("started in an empty folder, at step 0")
    with Training(folder, log, failpoints=f"save.pack=sleep:120@{KILLED_SAVE}") as training:
        training.watch(until=step + random.randrange(4, 15), exists=saved / "pack")
        losses = training.kill()
    chapter.event(f"[bold red]SIGKILL[/] in the middle of saving step {step}; training had reached {losses[-1].step}")
    found = sorted(file for file in saved.rglob("*") if file.is_file())
    chapter.detail("the files of that save are a temporary file and no commit.json:")
    for file in found:
        chapter.detail(f"  {file.relative_to(folder)}, {file.stat().st_size / 1e6:.1f} MB")
    if not found or any(file.name == "commit.json" for file in found):
        sys.exit(f"the kill did not happen during the save of step {step}: run the demo again")
    chapter.detail(f"so step {step} does not exist:")
    chapter.detail(f"$ ckpt-inspect {folder}")
    for line in inspect(str(folder)).splitlines():
        chapter.detail("  " + line)
    return losses


def killed_somewhere(chapter: Chapter, folder: Path, log: Path) -> list[Loss]:
    """Kill the training at a random moment, and return the losses."""
    with Training(folder, log) as training:
        start = training.watch(until=0)[0].step
        chapter.event(f"started again, continues with step {start}")
        training.watch(until=random.randrange(start + EVERY, STEPS - 2 * EVERY))
        time.sleep(random.uniform(0, 0.2))
        losses = training.kill()
    chapter.event(f"[bold red]SIGKILL[/] at a random moment; training had reached {losses[-1].step}")
    chapter.detail(f"steps that exist: {committed(folder)}")
    return losses


def finished(chapter: Chapter, folder: Path, log: Path) -> list[Loss]:
    """Start the training again and let it end, and return the losses."""
    with Training(folder, log) as training:
        start = training.watch(until=0)[0].step
        chapter.event(f"started again, continues with step {start}")
        losses = training.watch()
    chapter.event(f"done: step {losses[-1].step} was the last")
    chapter.detail(f"steps that exist: {committed(folder)}")
    return losses


def compare(reference: list[Loss], runs: list[list[Loss]]) -> bool:
    """Print the losses around each kill; return whether all are equal, bit for bit."""
    expected = {item.step: item for item in reference}
    by_run = [{item.step: item for item in run} for run in runs]
    table = Table("step", "undisturbed", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number in range(len(runs)):
        table.add_column(f"process {number + 1}")
    table.add_column()
    shown = sorted({s for kill in pairwise(by_run) for s in around(*kill)})
    for before, step in zip([None, *shown], shown, strict=False):
        if before is not None and step > before + 1:
            table.add_row("[dim]…")
        cells = [losses.get(step) for losses in by_run]
        equal = all(c == expected[step] for c in cells if c)
        texts = [f"{c.loss:.8f}" if c else "[dim]·" for c in (expected[step], *cells)]
        table.add_row(str(step), *texts, "[green]equal" if equal else "[bold red]DIFFERENT")
    console.print(table)
    differ = [item for run in runs for item in run if item != expected[item.step]]
    missing = expected.keys() - {step for losses in by_run for step in losses}
    twice = sum(map(len, by_run)) - len(expected) + len(missing)
    console.print(f"\n{len(expected)} steps, and {twice} done again after the kills: ", end="")
    if differ or missing:
        console.print(f"[bold red]{len(differ)} losses differ, {len(missing)} are missing")
        return False
    console.print("[bold green]every loss is equal, bit for bit")
    return True


def around(first: dict[int, Loss], second: dict[int, Loss]) -> set[int]:
    """Return the steps to show: around the first step of the second process, and around the last step of the first one."""
    resumed, killed = min(second), max(first)
    return {s for s in (resumed - 1, resumed, resumed + 1, killed - 1, killed, killed + 1) if s >= 0}


def compare_checkpoints(reference: Path, killed: Path) -> bool:
    """Print and return whether the last checkpoints of both runs have the same bytes."""
    one, other = ckpt.open(reference)[STEPS - 1], ckpt.open(killed)[STEPS - 1]
    names = list(one)
    equal = names == list(other) and one.tree() == other.tree()
    equal = equal and all(np.asarray(one[n]).tobytes() == np.asarray(other[n]).tobytes() for n in names)
    nbytes = sum(leaf.nbytes for leaf in one.leaves())
    console.print(f"The last checkpoints, {len(names)} arrays of {nbytes / 1e6:.1f} MB and all plain values: ", end="")
    console.print("[bold green]equal, bit for bit" if equal else "[bold red]DIFFERENT")
    return equal


def inspect(*arguments: str) -> str:
    """Return the output of the command ckpt-inspect."""
    command = [sys.executable, "-m", "ckpt.tools.inspect", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Run the demo, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("demo-run"), help="the folder to work in, which is replaced")
    folder: Path = parser.parse_args().dir
    began = time.monotonic()
    reference, killed = folder / "undisturbed", folder / "killed"
    logs = reference.with_suffix(".jsonl"), killed.with_suffix(".jsonl")
    for old in (reference, killed):
        shutil.rmtree(old, ignore_errors=True)
    for old in logs:
        old.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)

    console.print("\nexamples/train.py teaches a small GPT the source code of Python's standard library:")
    console.print(f"{STEPS} steps on one core, a checkpoint every {EVERY} steps, the last 3 are kept.\n")
    with Chapter(1, "A training run without kills") as chapter:
        losses = undisturbed(chapter, reference, logs[0])
    with Chapter(2, "The same training, killed twice") as chapter:
        runs = [part(chapter, killed, logs[1]) for part in (killed_in_a_save, killed_somewhere, finished)]
    with Chapter(3, "Do the two differ?"):
        equal = compare(losses, runs)
        equal = compare_checkpoints(reference, killed) and equal
    with Chapter(4, "What is on the disk"):
        patterns = ["--only=model.blocks.0.*", "--only=optimizer.state.6.*"]
        for arguments in ([str(killed), "--verify"], [str(killed), str(STEPS - 1), *patterns]):
            console.print(f"[bold]$ ckpt-inspect {shlex.join(arguments)}")
            console.print(inspect(*arguments), markup=False, soft_wrap=True)
    console.print(f"[dim]{time.monotonic() - began:.0f} s. The files are in {folder}/, the code in examples/.")
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
