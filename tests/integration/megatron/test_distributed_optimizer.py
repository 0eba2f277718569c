"""The distributed optimizer of Megatron-Core: killed ranks resume bit for bit, and steps load on another parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.torchrun import torchrun

import ckpt


def run(folder: Path, name: str, ranks: int, *options: str, status: int = 0) -> None:
    program = PROGRAMS / "megatron_distributed_optimizer.py"
    done = torchrun(ranks, program, str(folder / name), str(folder / f"{name}.losses"), *options)
    assert done.returncode == status, done.stdout + done.stderr[-6000:]


def losses(folder: Path, name: str, rank: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (folder / f"{name}.losses.{rank}").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
    return found


@pytest.mark.parametrize(
    "options", [["dp_reshardable"], ["fully_reshardable", "--bf16"], ["dp_zero_gather_scatter"]], ids=lambda options: options[0]
)
def test_killed_ranks_resume(tmp_path: Path, options: list[str]) -> None:
    run(tmp_path, "whole", 2, *options, "--steps=4")
    run(tmp_path, "cut", 2, *options, "--steps=4", "--kill-at=3", status=1)
    assert ckpt.open(tmp_path / "cut" / "ckpt").steps() == [1, 2]
    run(tmp_path, "cut", 2, *options, "--steps=4")
    for rank in range(2):
        assert losses(tmp_path, "cut", rank) == losses(tmp_path, "whole", rank)
        assert len(losses(tmp_path, "whole", rank)) == 4


@pytest.mark.parametrize(
    ("saved", "options"),
    [
        pytest.param([], ["dp_reshardable"], id="two to one data-parallel rank"),
        pytest.param([], ["fully_reshardable", "--bf16"], id="the same, in bfloat16"),
        pytest.param(["--tp=2"], ["fully_reshardable"], id="two to one tensor-parallel rank"),
    ],
)
def test_another_parallelism_loads_what_megatron_loads(tmp_path: Path, saved: list[str], options: list[str]) -> None:
    run(tmp_path, "run", 2, *options, *saved, "--steps=2", "--torch-dist")
    run(tmp_path, "run", 1, *options, "--seed=2", "--compare=2")
