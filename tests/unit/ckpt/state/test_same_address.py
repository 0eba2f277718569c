"""Arrays that begin at one address are one array only if shape, strides and type are equal, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ckpt.state.tree import PerRank, flatten


def stored_as(state: dict[str, Any], rank: int | None = None) -> dict[str, str]:
    """Return, by key of the state, the name of the leaf under which it is stored."""
    entries = flatten(state, rank).node["dict"]
    return {key: (node["ranks"]["0"] if "ranks" in node else node)["array"] for key, node in entries}


def test_arrays_at_one_address_are_tied_only_if_they_are_equal_views() -> None:
    x = torch.arange(8, dtype=torch.float32)
    complex_x = torch.randn(4, dtype=torch.complex64)
    state = {
        "empty": x[:0], "x": x, "head": x[:5], "bits": x.view(torch.int32), "same x": x, "same head": x[:5], "numpy": x.numpy(),
        "same numpy": x.numpy(), "every other": x[::2], "same every other": x[::2], "also empty": x[:0],
        "complex": complex_x, "conjugate": complex_x.conj(), "same conjugate": complex_x.conj(),
    }  # fmt: skip
    first_of = ("x", "head", "numpy", "every other", "conjugate")
    ties = {f"same {name}": name for name in first_of}
    assert stored_as(state) == {key: ties.get(key, key) for key in state}


def test_values_of_each_rank_are_not_tied_to_other_leaves() -> None:
    x = np.arange(8)
    assert stored_as({"a": x, "b": PerRank(x), "c": x, "d": PerRank(x)}, 0) == {"a": "a", "b": "b@0", "c": "a", "d": "d@0"}


@pytest.mark.parametrize("view", [lambda x: x[2:5], lambda x: x[::-1], lambda x: x[1::2]])
def test_notes_about_shared_memory_do_not_contain_addresses(view: Any) -> None:
    """Two ranks with equal states have equal notes but for the rank, wherever their memory lies."""
    kept = [np.zeros(1 << 12)]

    def notes(rank: int) -> dict[str, Any]:
        kept.append(np.zeros(100 * (rank + 1)))  # other addresses
        x = np.arange(6.0)
        kept.append(x)
        return {name: note._asdict() for name, note in flatten({"part": view(x), "x": x}, rank).aliases.items()}

    first, second = notes(0), notes(1)
    assert {name: note["start"] for name, note in first.items()} == {
        "part": 8 * int(view(np.arange(6))[0]),
        "x": 0,
    }
    assert first == {name: note | {"group": "part@0"} for name, note in second.items()}
    assert {note["group"] for note in second.values()} == {"part@1"}
