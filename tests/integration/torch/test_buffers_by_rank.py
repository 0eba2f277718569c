"""A run on several ranks whose buffers nobody synchronises, killed and resumed: each rank gets its own buffers back."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.forked_ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them")

STEPS = 16


def train(folder: Path, name: str, kind: str, *more: str) -> tuple[str, list[dict[str, str]]]:
    """Run programs/buffer_training.py on two ranks; return what it printed, and the line of each step of each rank."""
    done = run_ranks(2, PROGRAMS / "buffer_training.py", str(folder / name), str(folder / f"{name}.log"), kind, *more)
    assert ("Signal 9 (SIGKILL)" in done.stderr) if more else done.returncode == 0, done.stdout + done.stderr
    lines = [(folder / f"{name}.log.{rank}").read_text().splitlines() for rank in range(2)]
    return done.stdout, [{line.split()[0]: line for line in of_rank} for of_rank in lines]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "plain", "views", "wrapped"])
def test_losses_of_training_and_validation_after_a_kill(tmp_path: Path, kind: str) -> None:
    if kind == "fsdp2":
        pytest.importorskip("torch.distributed.fsdp", reason="fully_shard").fully_shard  # noqa: B018
    _, whole = train(tmp_path, "whole", kind)
    train(tmp_path, "cut", kind, "--kill-at=10")
    printed, resumed = train(tmp_path, "cut", kind)
    starts = re.findall(r"started at (\d+)", printed)
    assert len(starts) == 2
    assert set(starts) <= {"3", "6", "9"}, starts  # the newest save may have been cut, too
    for rank in range(2):
        assert len(whole[rank]) == STEPS
        assert resumed[rank] == whole[rank], f"rank {rank}"
    assert whole[0]["15"].split()[2] != whole[1]["15"].split()[2]  # the ranks validate with statistics of their own


def test_three_ranks_resume_what_two_saved(tmp_path: Path) -> None:
    """All statistics are wrapped in PerRank, in two parts of one buffer of the model. So rank 2 gets those of rank 0."""
    train(tmp_path, "cut", "wrapped", "--kill-at=10")
    url = str(tmp_path / "cut")
    done = run_ranks(3, PROGRAMS / "buffer_training.py", url, str(tmp_path / "three.log"), "wrapped")
    assert done.returncode == 0, done.stdout + done.stderr
    started = re.findall(r"started at (\d+) (\S.*)", done.stdout)
    assert len(started) == 3, done.stdout
    assert {step for step, _ in started} <= {"3", "6", "9"}
    assert started[2] == started[0]
    assert started[1] != started[0]
