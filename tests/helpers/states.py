"""Training states that a step number determines, and the comparison of states bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def state_of(step: int, size: int = 5000) -> dict[str, Any]:
    """Return the state of a step. Each element size is a block of its own: one never changes, one is slow, two are fast."""
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
    """Give `state` the values of `other`, in place for arrays, as a training step does, and return it."""
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


def differences(actual: Any, expected: Any, path: str = "state") -> list[str]:
    """Return where two states differ in type, shape or any bit."""
    if type(actual) is not type(expected):
        return [f"{path}: {type(actual).__name__} instead of {type(expected).__name__}"]
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            return [f"{path}: keys {list(actual)} instead of {list(expected)}"]
        return [d for k in expected for d in differences(actual[k], expected[k], f"{path}.{k}")]
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{path}: {len(actual)} entries instead of {len(expected)}"]
        return [d for i, (a, b) in enumerate(zip(actual, expected, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    if isinstance(expected, (np.ndarray, np.generic)):
        same = actual.dtype == expected.dtype and actual.shape == expected.shape and actual.tobytes() == expected.tobytes()
        return [] if same else [f"{path}: other bytes"]
    return [] if actual == expected else [f"{path}: {actual!r} instead of {expected!r}"]


def assert_same(actual: Any, expected: Any) -> None:
    """Check that two states are equal bit for bit."""
    found = differences(actual, expected)
    assert not found, "; ".join(found[:5])
