"""A training run with Paddle that is killed and restored has the losses of an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS

PROGRAM = str(PROGRAMS / "paddle_training.py")


def run(folder: Path, repo: str, name: str, *fault: object) -> tuple[int, dict[int, str]]:
    """Run a training program; return its exit status and its losses by step."""
    command = [sys.executable, PROGRAM, str(folder / repo), str(folder / name), *map(str, fault)]
    status = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=600).returncode
    lines = [line.split(maxsplit=1) for line in (folder / name).read_text().splitlines()]
    return status, {int(step): rest for step, rest in lines}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the losses of a training run that is not killed."""
    status, losses = run(tmp_path_factory.mktemp("quiet"), "repo", "losses")
    assert status == 0
    assert len(set(losses.values())) == len(losses) == 16
    return losses


@pytest.mark.parametrize("kill", [5, pytest.param(8, marks=pytest.mark.essential), 9, 14])
def test_every_loss_after_the_kill_is_equal(tmp_path: Path, quiet: dict[int, str], kill: int) -> None:
    status, before = run(tmp_path, "repo", "before", kill)
    assert status == -signal.SIGKILL
    status, after = run(tmp_path, "repo", "after")
    assert status == 0
    assert min(after) in (0, 3, 6, 9, 12, 15)
    assert min(after) > 0, "nothing was restored"
    assert before | after == quiet
    assert all(before[step] == quiet[step] for step in before)
