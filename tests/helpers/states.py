"""Training states that a step number determines, and the comparison of states bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def state_of(step: int, size: int = 5000) -> dict[str, Any]:
    """The state of a step. Each element size is a block of its own: one that never changes, one slow, two fast."""
    fast = np.random.default_rng(step)
    slow = np.random.default_rng(1000 + step // 3)
    never = np.random.default_rng(7)
    return {
        "step": step,
        "name": f"step {step}",
        "embed": never.integers(0, 255, 2 * size, dtype=np.uint8),
        "slow": {"a": slow.integers(0, 999, size, dtype=np.int16), "b": slow.integers(0, 9, (3, 5), dtype=np.int16)},
        "model": [fast.standard_normal(size, dtype=np.float32), np.float32(step) / 3],
        "moments": (fast.standard_normal((size // 10, 7)), np.arange(step, step + 9.0), np.zeros((0, 4))),
    }


def write_into(state: Any, other: Any) -> Any:
    """Give `state` the values of `other`, its arrays in place, as a training step does."""
    if isinstance(state, np.ndarray):
        state[...] = other
        return state
    if isinstance(state, dict):
        for key in state:
            state[key] = write_into(state[key], other[key])
        return state
    if isinstance(state, list):
        state[:] = [write_into(a, b) for a, b in zip(state, other, strict=True)]
        return state
    if isinstance(state, tuple):
        return tuple(write_into(a, b) for a, b in zip(state, other, strict=True))
    return other


def differences(got: Any, want: Any, path: str = "state") -> list[str]:
    """Where two states differ in type, shape or any bit."""
    if type(got) is not type(want):
        return [f"{path}: {type(got).__name__} instead of {type(want).__name__}"]
    if isinstance(want, dict):
        if list(got) != list(want):
            return [f"{path}: keys {list(got)} instead of {list(want)}"]
        return [d for k in want for d in differences(got[k], want[k], f"{path}.{k}")]
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return [f"{path}: {len(got)} entries instead of {len(want)}"]
        return [d for i, (a, b) in enumerate(zip(got, want, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    if isinstance(want, (np.ndarray, np.generic)):
        same = got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
        return [] if same else [f"{path}: other bytes"]
    return [] if got == want else [f"{path}: {got!r} instead of {want!r}"]


def assert_same(got: Any, want: Any) -> None:
    """Fail unless two states are equal bit for bit."""
    found = differences(got, want)
    assert not found, "; ".join(found[:5])
