"""Loads from deep in the stack: they return the newest step or an error, and never take a RecursionError for damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.folders import PROGRAMS

import ckpt
from ckpt.storage.base.checked_decode import parse_json


@pytest.mark.parametrize("levels", [1, 60, 150])
@pytest.mark.parametrize("with_like", [False, True])
def test_a_load_from_deep_in_the_stack_does_not_fall_back_to_an_older_step(
    tmp_path: Path, levels: int, with_like: bool
) -> None:
    """In a process of its own, because an import without frames may leave other packages half imported."""
    command = [sys.executable, str(PROGRAMS / "deep_loads.py"), str(tmp_path / "r"), str(levels), str(with_like)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    outcomes = set(json.loads(done.stdout))
    assert {"1", "low stack"} <= outcomes <= {"1", "low stack", "nested", "stack"}
    assert ckpt.open(tmp_path / "r").steps() == [0, 1], "a step counts as damaged"


def test_json_is_decoded_from_deep_in_the_stack() -> None:
    def decode_below(frames: int) -> Any:
        return parse_json(text) if frames == 0 else decode_below(frames - 1)

    text = "[" * 300 + "]" * 300
    used, frame = 0, sys._getframe()
    while frame.f_back is not None:
        used, frame = used + 1, frame.f_back
    value, depth = decode_below(sys.getrecursionlimit() - used - 200), 0
    while value:
        depth, value = depth + 1, value[0]
    assert depth == 299


def test_json_that_no_stack_can_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 1_000_000)
