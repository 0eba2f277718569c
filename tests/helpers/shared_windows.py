"""Windows that the ranks of one host share, and a saved state to read through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.groups.base import Group
from ckpt.loading.shared_window import SharedWindow
from helpers.rank_threads import all_well, on_ranks

SLOT = 4096


def window_of(group: Group, slots: int, parts: int) -> SharedWindow:
    """Return the window of a group, which must exist."""
    window = SharedWindow.create(group, slots, SLOT, parts)
    assert window is not None
    return window


def saved(root: Path, codec: Any = "none") -> dict[str, np.ndarray]:
    """Save a state of all ranks by two of them, with more blocks than the window has slots, and return it."""
    draw = np.random.default_rng(11)
    state: dict[str, np.ndarray] = {f"w{i}": draw.integers(0, 99, (700, 1000)).astype(np.float32) for i in range(30)}
    state |= {f"small{i}": draw.standard_normal(50) for i in range(20)} | {"turned": draw.standard_normal((400, 900))}
    all_well(on_ranks(2, lambda g: ckpt.save(state, root, 0, group=g, codec=codec)))
    return state


def empty(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a state of these shapes without values; one array is stored by columns, so that reads go through a buffer."""
    return {n: np.zeros_like(a, order="F" if n == "turned" else "C") for n, a in state.items()}


def mappings() -> int:
    """Return how many windows are mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:ckpt-load")
