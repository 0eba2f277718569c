"""Experts of a mixture that a number of ranks saves, and any other number loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.folders import PROGRAMS
from helpers.forked_ranks import run_checks_on_ranks, run_ranks

import ckpt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts and kills processes as Linux has them")

PROGRAM = PROGRAMS / "expert_training.py"
LAYOUTS = ("deepspeed", "megatron", "fastmoe")


def losses(root: Path, layout: str) -> dict[int, str]:
    """Return the loss of each step, as last written."""
    return dict(json.loads(line) for line in (root / f"{layout}.losses").read_text().splitlines())


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors of a state by name."""
    if isinstance(value, dict):
        return {path: tensor for key, entry in value.items() for path, tensor in tensors(entry, f"{name}.{key}").items()}
    return {name: value} if isinstance(value, torch.Tensor) else {}


def test_four_two_and_six_ranks_continue_the_training_of_one_process(tmp_path: Path) -> None:
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    whole.mkdir()
    divided.mkdir()
    done = run_ranks(1, PROGRAM, str(whole), "9")
    assert done.returncode == 0, done.stderr[-4000:]
    killed = run_ranks(4, PROGRAM, str(divided), "4", "2")
    assert killed.returncode != 0
    assert ckpt.open(divided / "fastmoe").steps()[-1] in (2, 3)
    for size, stop in ((2, 6), (6, 9)):
        done = run_ranks(size, PROGRAM, str(divided), str(stop))
        assert done.returncode == 0, done.stdout + done.stderr[-6000:]
        assert ckpt.open(divided / "megatron")[stop - 1].commit.world_size == size
    for layout in LAYOUTS:
        assert losses(divided, layout) == losses(whole, layout), layout
        one, many = (tensors(ckpt.load(root / layout)) for root in (whole, divided))
        assert one.keys() == many.keys()
        assert not [name for name, value in one.items() if not torch.equal(value, many[name])], layout


def test_wrong_groups_are_refused_and_experts_without_a_token_are_saved(tmp_path: Path) -> None:
    checks = ("different_numbers", "copies_that_differ", "without_a_token", "stack", "rows_of_a_rank")
    run_checks_on_ranks("expert_checks.py", 4, tmp_path, *checks)
