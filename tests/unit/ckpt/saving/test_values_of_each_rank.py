"""Values of which each rank has its own are restored to that rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.rank_threads import all_well, assert_equal, on_ranks
from helpers.states import assert_same

import ckpt
from ckpt.groups.base import Group


def test_values_of_each_rank_are_restored_to_it(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {
            "w": np.arange(10.0),
            "position": rank * 100,
            "reader": ckpt.PerRank({"buffer": np.full(3, rank), "seed": rank}),
            "same": [1, "x", None],
        }

    all_well(on_ranks(3, lambda g: ckpt.save(state(g.rank), tmp_path, 0, group=g)))

    def load(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        reader = ckpt.PerRank({"buffer": np.zeros(3, int), "seed": -1})
        like = {"w": np.zeros(10), "position": -1, "reader": reader, "same": [0, "", 0]}
        return ckpt.load(tmp_path, group=group), ckpt.load(tmp_path, like, group=group)

    for size in (3, 5):
        for rank, (new, filled) in enumerate(all_well(on_ranks(size, load))):
            own = rank % 3
            assert new["position"] == filled["position"] == own * 100
            assert new["reader"]["buffer"].tolist() == filled["reader"].value["buffer"].tolist() == [own] * 3
            assert new["reader"]["seed"] == filled["reader"].value["seed"] == own
            assert new["same"] == filled["same"] == [1, "x", None]
    assert str(state(1)["reader"]) == "PerRank({'buffer': array([1, 1, 1]), 'seed': 1})"
    assert ckpt.load(tmp_path, group=None)["position"] == 0
    assert sorted(ckpt.open(tmp_path)[0]) == ["reader.buffer@0", "reader.buffer@1", "reader.buffer@2", "w"]


def generators(seed: int) -> dict[str, Any]:
    """Return a random generator of each kind, each advanced by a few numbers."""
    torch = pytest.importorskip("torch")
    found: dict[str, Any] = {
        "philox": np.random.Generator(np.random.Philox(seed)), "pcg": np.random.default_rng(seed),
        "bits": np.random.SFC64(seed), "old": np.random.RandomState(seed), "python": random.Random(seed),
        "torch": torch.Generator().manual_seed(seed),
    }  # fmt: skip
    draws(found, 3 + seed)
    return found


def draws(made: dict[str, Any], count: int = 4) -> list[Any]:
    """Return the next numbers of each generator."""
    torch = pytest.importorskip("torch")
    return [
        made["philox"].random(count).tolist(), made["pcg"].integers(9, size=count).tolist(),
        np.random.Generator(made["bits"]).random(count).tolist(), made["old"].rand(count).tolist(),
        [made["python"].random() for _ in range(count)], torch.rand(count, generator=made["torch"]).tolist(),
    ]  # fmt: skip


def test_random_generators_of_each_rank_continue_where_they_were(tmp_path: Path) -> None:
    all_well(on_ranks(3, lambda g: ckpt.save({"random": generators(g.rank)}, tmp_path, 0, group=g)))
    for size in (3, 4, 1):
        like = [{"random": generators(77 + rank)} for rank in range(size)]
        loaded = all_well(on_ranks(size, lambda g, like=like: ckpt.load(tmp_path, like[g.rank], group=g)))
        for rank, state in enumerate(loaded):
            assert draws(state["random"]) == draws(generators(rank % 3)), f"rank {rank} of {size}"


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [100, (64 << 10) + 1, 300_000, 9 << 20])
def test_bytes_of_each_rank_are_restored_to_it(tmp_path: Path, nbytes: int) -> None:
    """This holds for any length, and whether or not the lengths are the same."""

    def state(rank: int) -> dict[str, Any]:
        return {"w": np.arange(50_000.0), "same length": bytes([65 + rank]) * nbytes, "other": bytes(rank * nbytes)}

    all_well(on_ranks(3, lambda g: ckpt.save(state(g.rank), tmp_path, 0, group=g)))
    for size in (3, 5):
        like = {"w": np.zeros(50_000), "same length": b"", "other": b""}
        new = all_well(on_ranks(size, lambda g: ckpt.load(tmp_path, group=g)))
        filled = all_well(on_ranks(size, lambda g, like=like: ckpt.load(tmp_path, dict(like), group=g)))
        for rank in range(size):
            assert_equal(new[rank], state(rank % 3))
            assert_equal(filled[rank], state(rank % 3))


def numpy_scalars(rank: int) -> dict[str, Any]:
    return {
        "float": np.float64(rank + 0.5), "flag": np.bool_(rank % 2), "text": np.str_("r" * rank), "none": np.void(b""),
        "time": np.datetime64("2024-01-01") + rank, "half": ml_dtypes.bfloat16(rank), "same": np.int16(-7),
        "record": np.array((rank, b"x"), [("a", "<i4"), ("b", "S3")])[()], "long": np.bytes_(bytes([65 + rank]) * 70_000),
    }  # fmt: skip


def test_numpy_scalars_of_each_rank_are_restored_to_it(tmp_path: Path) -> None:
    """They are plain values, like Python's numbers, and not replicas of one array."""

    def as_saved(rank: int) -> dict[str, Any]:
        return numpy_scalars(rank) | {"own": ckpt.PerRank(np.float32(rank))}

    all_well(on_ranks(2, lambda g: ckpt.save(as_saved(g.rank), tmp_path, 0, group=g)))
    for rank, loaded in enumerate(all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, group=g)))):
        assert_same(loaded, numpy_scalars(rank) | {"own": np.float32(rank)})
    like = [numpy_scalars(1 - rank) | {"float": np.zeros(()), "text": np.str_("r" * rank)} for rank in range(2)]
    for rank, loaded in enumerate(all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, like[g.rank], group=g)))):
        assert loaded["float"] is like[rank]["float"]  # an array without axes is filled in place
        assert_same(loaded | {"float": loaded["float"][()]}, numpy_scalars(rank))
    sharded = {"float": ckpt.Shard(np.zeros(()), (), ())}
    assert ckpt.load(tmp_path, sharded, group=None)["float"].local == 0.5
    with pytest.raises(ckpt.LeafMismatch, match="leaf float: .* has dtype float64, `like` has float32"):
        ckpt.load(tmp_path, {"float": np.float32(0)}, group=None)
    with pytest.raises(ckpt.LeafMismatch, match=r"leaf float: .* has shape \[\], `like` has \[2\]"):
        ckpt.load(tmp_path, {"float": np.zeros(2)}, group=None)
