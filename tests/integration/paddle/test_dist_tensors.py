"""Distributed tensors of Paddle are saved as shards, filled in place, and loaded under other placements."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.folders import PROGRAMS
from helpers.paddle_ranks import run_ranks

import ckpt

PROGRAM = PROGRAMS / "paddle_dist_tensors.py"
SIZES = {"rows": 2, "sharded": 2, "grid": 4, "whole": 1}


def run(folder: Path, division: str, repository: str, name: str, *fault: int) -> tuple[set[int], list[dict[int, str]]]:
    return run_ranks(PROGRAM, SIZES[division], folder, repository, name, division, *fault)


def arrays(url: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of all arrays of a step by name."""
    opened = ckpt.open(url)[step]
    return {name: np.asarray(opened[name][...]).tobytes() for name in opened}


@pytest.mark.parametrize("division", ["rows", "sharded"])
def test_every_loss_after_the_kill_is_equal(tmp_path: Path, division: str) -> None:
    status, quiet = run(tmp_path, division, "quiet", "quiet")
    assert status == {0}
    status, before = run(tmp_path, division, "repo", "before", 4)
    assert status == {-signal.SIGKILL}
    status, after = run(tmp_path, division, "repo", "after")
    assert status == {0}
    for rank in range(SIZES[division]):
        assert min(after[rank]) == 4
        assert before[rank] | after[rank] == quiet[rank]


@pytest.mark.parametrize("order", [("rows", "grid", "whole"), ("whole", "sharded", "rows")], ids="-".join)
def test_other_placements_load_the_same_values(tmp_path: Path, order: tuple[str, ...]) -> None:
    """A training run continues under other placements; what a division restores is, as a whole, what the one before saved."""
    starts: list[Any] = []
    for number, division in enumerate(order):
        status, losses = run(tmp_path, division, "repo", f"part{number}", *([4 + 2 * number] if number < 2 else []))
        assert status == {0 if number == 2 else -signal.SIGKILL}
        starts.append(min(losses[0]))
    assert starts == [0, 4, 6]
    first = arrays(tmp_path / f"repo-{order[0]}", 0)
    expected = plain_values()
    assert {name: first[name] for name in expected} == expected
    for division, start in zip(order[1:], (4, 6), strict=True):
        restored, saved = arrays(tmp_path / f"repo-{division}", start), arrays(tmp_path / "repo", start - 1)
        assert restored == saved
        assert any("moment1" in name for name in saved)


def plain_values() -> dict[str, bytes]:
    """Return some values with which the program begins."""
    draw = np.random.default_rng(1)
    weight, *_ = [draw.standard_normal(shape).astype("float32") for shape in ((6, 4), (4,), (4, 3), (3,))]
    extra = {f"extra.{shape}": draw.integers(0, 99, shape).tobytes() for shape in ((7, 4), (5,), (2, 3, 6), (1, 4))}
    return {"model.0.weight": weight.tobytes(), **extra}
