"""Saves and checks steps with the calls that every version of ckpt has.

steps URL CODEC LAST [BACK]    check all steps, restore the newest one or BACK, and save up to LAST
train STEPS SECONDS            train up to STEPS under ckpt-run, which names the folder of the steps
trained URL STEPS              check the result of that training
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numcodecs
import numpy as np

import ckpt

CODECS = {"none": None, "zstd": numcodecs.Zstd(3), "lz4": numcodecs.LZ4(), "blosc": numcodecs.Blosc(), "auto": "auto"}


def state_of(step: int) -> dict[str, Any]:
    """Return the state of a step: one leaf changes, one stays the same, and there are plain values."""
    weights = np.random.default_rng(7).standard_normal(300_000).astype(np.float32)
    return {
        "w": weights + np.float32(step),
        "frozen": np.arange(100_000),
        "more": {"x": [np.full((3, 5), step, np.int16), step, "a"]},
    }


def require_same(found: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    for name in ("w", "frozen"):
        assert np.array_equal(found[name], expected[name]), (name, step)
    (array, *values), (expected_array, *expected_values) = found["more"]["x"], expected["more"]["x"]
    assert np.array_equal(array, expected_array)
    assert values == expected_values


def steps(url: str, codec: str, last: str, back: str | None = None) -> None:
    """Check the steps of a repository, and add some."""
    with ckpt.Checkpointer(url, every=1, keep=None, codec=CODECS[codec]) as checkpointer:
        state, start = checkpointer.restore(state_of(0), step=None if back is None else int(back))
        if start:
            require_same(state, start - 1)
            for step in ckpt.open(url).steps():
                require_same(ckpt.load(url, step=step), step)
        for step in range(start, int(last) + 1):
            checkpointer.step(step, state_of(step))
        checkpointer.wait()
    assert ckpt.open(url).steps()[-1] == int(last)
    require_same(ckpt.load(url), int(last))


def train(count: str, seconds: str) -> None:
    """Train: each step adds other numbers, so that a repeated or a missing step changes the result."""
    with ckpt.Checkpointer(every=5, keep=3) as checkpointer:
        state, start = checkpointer.restore({"w": np.zeros(50_000), "step": -1})
        for step in range(start, int(count)):
            state["w"] += np.random.default_rng(step).standard_normal(50_000)
            state["step"] = step
            time.sleep(float(seconds))
            checkpointer.step(step, state)


def trained(url: str, count: str) -> None:
    """Check the newest step of `train`."""
    expected = np.zeros(50_000)
    for step in range(int(count)):
        expected += np.random.default_rng(step).standard_normal(50_000)
    found = ckpt.load(url)
    assert found["step"] == int(count) - 1
    assert np.array_equal(found["w"], expected)


if __name__ == "__main__":
    {"steps": steps, "train": train, "trained": trained}[sys.argv[1]](*sys.argv[2:])
