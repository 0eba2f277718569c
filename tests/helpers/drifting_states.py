"""States that drift as in training: a few weights change in each step, moments change entirely, and a part never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.format.block_difference import BaseBlock
from ckpt.format.manifest import Row
from helpers.repositories import assert_all_load

WEIGHTS = 120_000
"""Elements of the leaf that drifts."""


def drifting_state(step: int) -> dict[str, Any]:
    """Return the state of a step. Its leaves have elements of different sizes, so that each is a block of its own."""
    weights = np.random.default_rng(1).standard_normal(WEIGHTS, dtype=np.float32)
    for earlier in range(1, step + 1):
        moved = np.random.default_rng(1000 + earlier).integers(0, WEIGHTS, WEIGHTS // 200)
        weights[moved] += np.float32(1e-3)
    return {
        "step": step,
        "weights": weights,
        "moments": np.random.default_rng(step).standard_normal(10_000),
        "frozen": np.random.default_rng(2).integers(0, 255, 40_000, dtype=np.uint8),
    }


def weight_row(root: Path | str, step: int) -> Row:
    """Return the row of the weights of a step."""
    return ckpt.open(root)[step].manifest().find([("weights", None)])[0][0]


def base_of_weights(root: Path | str, step: int) -> BaseBlock:
    """Return the base of the weights of a step, which must be a difference."""
    base = weight_row(root, step).base
    assert base is not None, f"step {step} has no difference"
    return base


def pack_step(pack: str | None) -> int:
    """Return the step that wrote a pack."""
    assert pack is not None
    return int(pack.split("/")[1])


def assert_drifting_steps_load(root: Path | str, acknowledged: int | None = None) -> list[int]:
    """Check that every step loads bit for bit and verifies, and that the newest is at least the acknowledged one."""
    return assert_all_load(root, acknowledged, drifting_state)
