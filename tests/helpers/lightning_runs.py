"""Runs of programs/lightning_training.py: one that is never killed, one that is, and its continuation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from helpers.folders import PROGRAMS
from helpers.processes import python_path


class Training:
    """Runs of programs/lightning_training.py with the same options."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options = folder, options

    def run(self, name: str, *more: str, status: int = 0) -> str:
        """Run it once, with a repository and losses of that name; return what it printed."""
        env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, PROGRAMS / "lightning_training.py", self.url(name), self.folder / f"{name}.losses",
             *self.options, *more],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == status, done.stdout
        return done.stdout

    def url(self, name: str) -> Path:
        return self.folder / name

    def losses(self, name: str, rank: int = 0) -> dict[tuple[str, str], str]:
        """Return the line of each batch by epoch and batch; one that a restart repeated counts once, as it was last."""
        lines = (self.folder / f"{name}.losses.{rank}").read_text().splitlines()
        return {tuple(line.split()[:2]): line for line in lines}

    def killed_and_resumed(self, batches: int, ranks: int = 1) -> str:
        """Compare an unbroken run with one that is killed after some batches; return what the resumed run printed."""
        self.run("whole")
        self.run("cut", f"--kill-at={batches}", status=-signal.SIGKILL)
        assert len(self.losses("cut")) == batches
        printed = self.run("cut")
        assert "ckpt: resumed from step" in printed
        for rank in range(ranks):
            assert self.losses("cut", rank) == self.losses("whole", rank)
        assert len(self.losses("whole")) > batches
        return printed
