"""The local shards of a state: which leaves are planned, checked and committed as parts of an array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.api import as_group
from ckpt.saving.local_shards import local_shards
from ckpt.state.tree import flatten

torch = pytest.importorskip("torch")

ARRAY = np.arange(12.0).reshape(3, 4)

WHOLE = {
    "box": lambda x: ckpt.Shard(x, (3, 4), (0, 0)),
    "flat": lambda x: ckpt.Shard(x, (3, 4), flat=0),
    "torch": lambda x: ckpt.Shard(torch.from_numpy(x), (3, 4), (0, 0)),
    "replica": lambda x: ckpt.Shard(x, (3, 4), (0, 0), replica=(0, 1)),
    "no axes": lambda x: ckpt.Shard(x[0, 0], (), ()),
}
PARTS = {
    "rows": lambda x: ckpt.Shard(x, (4, 4), (0, 0)),
    "two boxes": lambda x: ckpt.Shard([x[:2], x[2:]], (3, 4), [(0, 0), (2, 0)]),
    "flat": lambda x: ckpt.Shard(x, (4, 4), flat=2),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_shard_that_is_the_whole_array_is_saved_as_a_plain_array_by_a_process_alone(tmp_path: Path, kind: str) -> None:
    """Its boxes need no check that they cover the array, for which the manifest would be read again."""
    state = {"w": WHOLE[kind](ARRAY.copy())}
    (shard,) = local_shards(flatten(state), as_group(None))
    assert shard.part is None
    checkpoint = ckpt.save(state, tmp_path, 0, group=None)
    expected: Any = ARRAY[0, 0] if kind == "no axes" else ARRAY
    np.testing.assert_array_equal(np.asarray(ckpt.load(tmp_path)["w"]), expected)
    assert checkpoint.commit.raw_bytes == expected.nbytes
    assert checkpoint.commit.leaves == 1


@pytest.mark.parametrize("kind", PARTS)
def test_a_shard_that_is_a_part_is_checked(tmp_path: Path, kind: str) -> None:
    state = {"w": PARTS[kind](ARRAY.copy()), "whole": WHOLE["box"](ARRAY + 1)}
    assert all(shard.part is not None for shard in local_shards(flatten(state), as_group(None)) if shard.name == "w")
    if kind == "two boxes":
        checkpoint = ckpt.save(state, tmp_path, 0, group=None)
        np.testing.assert_array_equal(ckpt.load(tmp_path)["w"], ARRAY)
        np.testing.assert_array_equal(ckpt.load(tmp_path)["whole"], ARRAY + 1)
        assert checkpoint.commit.raw_bytes == 2 * ARRAY.nbytes
    else:
        with pytest.raises(ckpt.StepRefused):
            ckpt.save(state, tmp_path, 0, group=None)


def test_whole_shards_of_one_memory_are_tied_or_refused() -> None:
    memory = ARRAY.copy()
    tied = flatten({"a": WHOLE["box"](memory), "b": WHOLE["box"](memory)})
    assert list(tied.leaves) == ["a"]
    with pytest.raises(ckpt.UnsupportedLeaf, match="share memory"):
        flatten({"a": WHOLE["box"](memory), "b": ckpt.Shard(memory.reshape(-1), (12,), (0,))})
    with pytest.raises(ckpt.UnsupportedLeaf, match="share memory"):
        flatten({"a": WHOLE["box"](memory), "b": memory[1:]})
