"""Loads from deep in the stack: they return the newest step or an error, and never take a RecursionError for damage."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import ckpt
from ckpt.errors import FormatError
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import CkptError

T = TypeVar("T")


def call_below(frames: int, call: Callable[[], T]) -> T:
    """Return what `call` returns below this many frames more."""
    return call() if frames == 0 else call_below(frames - 1, call)


def used_frames() -> int:
    used, frame = 0, sys._getframe(1)
    while frame is not None:
        used, frame = used + 1, frame.f_back
    return used


def nested(levels: int, step: int) -> Any:
    state: Any = {"step": step, "a": np.full(3, step)}
    for _ in range(levels):
        state = {"n": state}
    return state


@pytest.mark.parametrize("levels", [1, 60, 150])
@pytest.mark.parametrize("with_like", [False, True])
def test_a_load_from_deep_in_the_stack_does_not_fall_back_to_an_older_step(
    tmp_path: Path, levels: int, with_like: bool
) -> None:
    url, like = tmp_path / "r", nested(levels, -1)
    for step in range(2):
        ckpt.save(nested(levels, step), url, step=step)
    files = sorted(url.rglob("*"))
    results: set[int | str] = set()
    for frames in range(0, sys.getrecursionlimit() - used_frames() - 5, 7):
        try:
            found = call_below(frames, lambda: ckpt.load(url, like=like if with_like else None))
        except RecursionError:  # the frames of the test itself, or fewer than a message takes
            results.add("stack")
        except FormatError as error:
            assert "nested too deeply for the stack of this call" in str(error)
            results.add("deep")
        except CkptError as error:
            assert re.match(r"a load needs 150 frames of the stack, and \d+ of \d+ are in use", str(error)), error
            results.add("few")
        else:
            for _ in range(levels):
                found = found["n"]
            results.add(found["step"])
    assert {1, "few"} <= results <= {1, "few", "deep", "stack"}
    assert sorted(url.rglob("*")) == files, "a step was marked as damaged"


def test_json_is_decoded_from_deep_in_the_stack() -> None:
    text = "[" * 300 + "]" * 300
    value = call_below(sys.getrecursionlimit() - used_frames() - 200, lambda: parse_json(text))
    depth = 0
    while value:
        depth, value = depth + 1, value[0]
    assert depth == 299


def test_json_that_no_stack_can_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 1_000_000)
