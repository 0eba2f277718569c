"""A training run of Megatron-Core that is killed resumes bit for bit, and its steps load on another parallelism."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.folders import PROGRAMS
from helpers.torchrun import torchrun

import ckpt


def run(folder: Path, name: str, ranks: int, *options: str, status: int = 0) -> str:
    done = torchrun(ranks, PROGRAMS / "megatron_training.py", str(folder / name), str(folder / f"{name}.losses"), *options)
    assert done.returncode == status, done.stdout + done.stderr[-6000:]
    return done.stdout + done.stderr


def losses(folder: Path, name: str, rank: int = 0) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (folder / f"{name}.losses.{rank}").read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
    return found


def test_killed_ranks_resume(tmp_path: Path) -> None:
    run(tmp_path, "whole", 2, "--tp=2")
    run(tmp_path, "cut", 2, "--tp=2", "--kill-at=5", status=1)
    assert ckpt.open(tmp_path / "cut" / "ckpt").steps() == [1, 2, 3, 4]
    printed = run(tmp_path, "cut", 2, "--tp=2")
    for rank in range(2):
        assert losses(tmp_path, "cut", rank) == losses(tmp_path, "whole", rank)
    assert len(losses(tmp_path, "whole")) == 8
    assert "common.args: these attributes are not stored, because they are not plain values: loss" in printed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two tensor-parallel ranks, by ckpt and in Megatron's own format."""
    folder = tmp_path_factory.mktemp("megatron")
    run(folder, "run", 2, "--tp=2", "--steps=2", "--torch-dist")
    return folder


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, [], id="one rank"),
        pytest.param(2, ["--pp=2"], id="two pipeline stages"),
        pytest.param(2, [], id="two data-parallel ranks"),
    ],
)
def test_another_parallelism_loads_what_megatron_loads(saved: Path, ranks: int, options: list[str]) -> None:
    run(saved, "run", ranks, *options, "--seed=2", "--compare=2")


def test_import_of_megatrons_own_format(saved: Path) -> None:
    """It is the state that ckpt saved at the same step."""
    command = [sys.executable, "-m", "ckpt.tools.import_step", str(saved / "run" / "iter_0000002"), str(saved / "imported")]
    subprocess.run(command, check=True, timeout=600)
    imported, whole = ckpt.load(saved / "imported"), ckpt.load(saved / "run" / "ckpt", step=2)
    assert imported["common"] == whole["common"]
    assert imported["objects"].keys() == whole["objects"].keys()
    assert imported["tensors"].keys() == whole["tensors"].keys()
    assert all(torch.equal(imported["tensors"][name], tensor) for name, tensor in whole["tensors"].items())
