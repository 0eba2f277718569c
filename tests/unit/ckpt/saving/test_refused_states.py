"""States of ranks that contradict each other are refused on all ranks, with leaf and rank."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rank_threads import all_well, on_ranks, refused

import ckpt
from ckpt.groups.base import Group, ranks_text
from ckpt.groups.threads import ThreadGroup
from ckpt.saving.replica_check import agreed_descriptions, describe_leaves, missing_copies_text
from ckpt.state.tree import encode_tree, flatten


def test_a_gap_is_refused_with_leaf_and_box(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": ckpt.Shard(np.zeros((4, 6)), (10, 6), (6 * rank, 0))}

    for error in refused(tmp_path, state):
        assert isinstance(error, ckpt.StepRefused)
        assert "step 1: leaf w: no rank stored [4:6, 0:6] of shape (10, 6), ranks 0, 1 stored what lies beside it" in str(error)


def test_a_leaf_of_one_rank_only_is_refused(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"a": np.zeros(100_000)} | ({"only": np.zeros(100_000)} if rank else {})

    for error in refused(tmp_path, state):
        assert "leaf only is on rank 1 but not on rank 0" in str(error)
        assert "ckpt.Shard" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["embed", "norm", "z"])
@pytest.mark.parametrize("instead", ["", "another"])
def test_a_missing_replica_is_named_with_its_rank(tmp_path: Path, lost: str, instead: str) -> None:
    """Ranks divide the writing of replicas, so that the bytes that are missing may belong to another leaf."""

    def state(rank: int) -> Any:
        whole = {"embed": np.ones((500, 70)), "norm": np.ones(90_000), "z": np.ones((3000, 31)), "count": rank}
        if rank == 2:
            renamed = whole.pop(lost)
            if instead:
                whole[instead] = renamed
        return whole

    for error in refused(tmp_path, state, 4):
        assert isinstance(error, ckpt.StepRefused)
        assert f"leaf {lost} is on ranks 0, 1, 3 but not on rank 2, where each should have" in str(error).replace(
            f", leaf {instead} is on rank 2 but not on ranks 0, 1, 3", ""
        )
        assert (f"leaf {instead} is on rank 2 but" in str(error)) == bool(instead)


@pytest.mark.slow
@pytest.mark.parametrize("lacking", [{0}, {1}, {3}, {1, 2, 3}, {0, 1, 2}], ids=str)
@pytest.mark.parametrize("size", [1, 64, 500, 20_000])
def test_a_missing_replica_of_any_size_is_refused(tmp_path: Path, size: int, lacking: set[int]) -> None:
    """One rank writes the whole of a small replica: if another rank lacks the leaf, no bytes are missing."""

    def state(rank: int) -> Any:
        return {"d": np.arange(1000.0)} | ({} if rank in lacking else {"x": np.ones(size)})

    for error in refused(tmp_path, state, 4):
        assert isinstance(error, ckpt.StepRefused)
        assert f"step 1: leaf x is on {ranks_text(sorted({*range(4)} - lacking))} but not on" in str(error)


def test_replicas_are_compared_among_the_ranks_that_divide_them() -> None:
    """Two pairs of ranks have replicas, and so do all four: a leaf of one pair is not missing on the other pair."""

    def text(**leaves: Sequence[str]) -> str:
        return json.dumps(
            {sharer: base64.b64encode(zlib.compress(json.dumps(names).encode())).decode() for sharer, names in leaves.items()}
        )

    first, second = text(pair1="a", all="x"), text(pair2="b", all="x")
    seen = {first: [0, 1], second: [2, 3]}
    assert missing_copies_text(seen, lambda _: {}) == ""
    seen = {first: [0], text(pair1="c", all="x"): [1], second: [2, 3]}
    assert missing_copies_text(seen, lambda _: {}).startswith("leaf a is on rank 0 but not on rank 1, leaf c is on rank 1 but")
    assert missing_copies_text(seen, lambda names: {name: {0, 1} for name in names}) == "", (
        "the rows of a rank show that it has them"
    )
    seen = {text(all=[f"w{i}" for i in range(9)]): [0, 1], text(): [2]}
    assert "leaf w2 is on ranks 0, 1 but not on rank 2 and 6 more leaves, where each" in missing_copies_text(seen, lambda _: {})


def test_more_replicas_than_ranks_are_refused(tmp_path: Path) -> None:
    """Even a leaf so small that one rank writes all of it is refused; of a larger one a part would be missing."""

    def save(group: Group, of: int) -> Any:
        state = {"w": ckpt.Shard(np.ones((2, 5)), (2, 5), (0, 0), replica=(group.rank, of))}
        return ckpt.save(state, tmp_path, of, group=group)

    for rank, error in enumerate(on_ranks(2, lambda g: save(g, 3))):
        assert isinstance(error, ckpt.UnsupportedLeaf)
        assert f"leaf w: its shard is replica {rank} of 3, but only 2 ranks save" in str(error)
    all_well(on_ranks(2, lambda g: save(g, 2)))
    assert ckpt.open(tmp_path).steps() == [2]


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_that_all_have_the_same_replica_number_are_refused(tmp_path: Path, number: int) -> None:
    def state(_: int) -> Any:
        return {"w": ckpt.Shard(np.ones((64, 5000)), (64, 5000), (0, 0), replica=(number, 2))}

    for error in refused(tmp_path, state):
        assert "leaf w: no rank stored" in str(error)
        assert "save a Shard that has it (each i of replica=(i, n))" in str(error)


def test_a_shard_under_another_name_on_one_rank_is_named(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        mine = ckpt.Shard(np.ones((2, 5)), (8, 5), (2 * rank, 0))
        return {"a": np.ones(70_000), "other" if rank == 2 else "w": mine}

    for error in refused(tmp_path, state, 4):
        assert "leaf w: no rank stored [4:6, 0:5] of shape (8, 5), ranks 1, 3 stored what lies beside it" in str(error)


def test_an_overlap_is_refused(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": ckpt.Shard(np.full((6, 2), rank), (10, 2), (4 * rank, 0))}

    for error in refused(tmp_path, state):
        assert isinstance(error, ckpt.StepRefused)
        assert "step 1: leaf w: [0:6, 0:2] of rank 0 and [4:10, 0:2] of rank 1 overlap" in str(error)


def test_different_shapes_are_refused(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        return {"w": ckpt.Shard(np.zeros(4), (8 + rank,), (4 * rank,))}

    for error in refused(tmp_path, state):
        assert "step 1: leaf w" in str(error)
        assert "(8,) on rank 0" in str(error)
        assert "(9,) on rank 1" in str(error)


CONTRADICTIONS: dict[str, tuple[Callable[[int], Any], str, str]] = {
    # What a rank has as `w`, and the shapes of ranks 0 and 1. One rank writes all of it, so no row shows the difference.
    "plain": (lambda r: np.full(4 + r, 0.5), "(4,)", "(5,)"),
    "axes": (lambda r: np.full((1,) * r, 3.0), "()", "(1,)"),
    "dtype": (lambda r: np.ones(4, "f4" if r else "f8"), "(4,)", "(4,)"),
    "empty": (lambda r: np.ones((0, 3 + r)), "(0, 3)", "(0, 4)"),
    "copy of a shard": (lambda r: ckpt.Shard(np.ones(4), (4 + r,), (0,), replica=(r, 2)), "(4,)", "(5,)"),
    "no elements here": (lambda r: ckpt.Shard(np.ones(0 if r else 4), (4 + r,), (0,)), "(4,)", "(5,)"),
    "plain and shard": (lambda r: np.ones(5) if r else ckpt.Shard(np.ones(4), (4,), (0,)), "(4,)", "(5,)"),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_replicas_of_different_shapes_or_dtypes_are_refused(tmp_path: Path, kind: str, verify: bool) -> None:
    make, first, second = CONTRADICTIONS[kind]
    both = lambda rank: {"a": np.ones(3), "w": make(rank), "z": [np.ones(2), 5]}  # noqa: E731
    for error in refused(tmp_path, both, verify_replicas=verify):
        assert isinstance(error, ckpt.StepRefused)
        dtype = "float32" if kind == "dtype" else "float64"
        expected = f"leaf w is float64 {first} on rank 0 and {dtype} {second} on rank 1; rename"
        assert str(error).startswith(f"step 1: {expected}"), error


def test_a_module_of_another_size_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for error in refused(tmp_path, lambda rank: {"m": torch.nn.Linear(3, 3 + rank)}):
        assert "m.weight is float32 (3, 3) on rank 0 and float32 (4, 3) on rank 1" in str(error)
        assert "ckpt.PerRank" in str(error)


def test_descriptions_of_leaves_are_short_and_equal_on_all_ranks(tmp_path: Path) -> None:
    """All ranks of a DDP state publish one text, small beside the tree, without leaves that have rows or belong to one rank."""

    def state(rank: int) -> dict[str, Any]:
        layers = {f"layers.{i}.{n}.weight": np.full((8, 8), rank) for i in range(100) for n in ("up", "down", "norm")}
        mine = ckpt.Shard(np.ones(3), (6,), (3 * rank,))
        return {"model": layers, "mine": mine, "own": ckpt.PerRank(np.ones(rank + 1)), "none": np.ones(0)}

    flats = [flatten(state(rank), rank) for rank in range(2)]
    assert describe_leaves(flats[0]) == describe_leaves(flats[1])
    described = agreed_descriptions({describe_leaves(flats[0]): 0})
    assert set(described) == {name for name in flats[0].leaves if name.startswith("model")} | {"none"}
    assert described["model.layers.7.up.weight"] == (0, "int64", (8, 8))
    assert len(describe_leaves(flats[0])) < len(encode_tree(flats[0].node)) / 5


def test_different_options_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("blake3")
    groups = ThreadGroup.make(2)
    kinds = ["xxh3-128", "blake3"]
    found = on_ranks(2, lambda g: ckpt.save({"a": np.zeros(9000)}, tmp_path, 0, group=g, digest=kinds[g.rank]), groups)
    assert all(isinstance(e, ckpt.StepRefused) and "same options" in str(e) for e in found)


def test_replicas_that_differ_are_found(tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        array = np.arange(60_000.0).reshape(300, 200)
        if rank == 2:
            array[17, 3] = -1
        half = slice(150 * (rank % 2), 150 * (rank % 2) + 150)
        return {"w": array, "half": ckpt.Shard(np.ones((150, 9)), (300, 9), (half.start, 0), replica=(rank // 2, 2))}

    for error in refused(tmp_path, state, 4, verify_replicas=True):
        assert isinstance(error, ckpt.StepRefused)
        assert "leaf w differs between rank 0 and rank 2" in str(error)
    groups = ThreadGroup.make(4)
    good = lambda rank: {**state(rank), "w": np.ones((300, 200))}  # noqa: E731
    all_well(on_ranks(4, lambda g: ckpt.save(good(g.rank), tmp_path, 5, group=g, verify_replicas=True), groups))


def test_replicas_are_verified_by_all_ranks_or_none(tmp_path: Path) -> None:
    groups = ThreadGroup.make(4)
    verify = lambda g: ckpt.save({"w": np.full(90_000, g.rank)}, tmp_path, 0, group=g, verify_replicas=g.rank == 2)  # noqa: E731
    for error in on_ranks(4, verify, groups):
        assert isinstance(error, ckpt.StepRefused)
        assert "verify_replicas=True on rank 2, False on ranks 0, 1, 3" in str(error)
    assert ckpt.open(tmp_path).steps() == []


def test_a_leaf_that_no_rank_stores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ckpt.StepRefused, match="leaf w: no rank stored any of it"):
        ckpt.save({"w": ckpt.Shard(np.zeros((0, 4)), (10, 4), (0, 0))}, tmp_path, 0)
    for error in on_ranks(2, lambda g: ckpt.save({"w": ckpt.Shard(np.zeros((0, 4)), (10, 4), (0, 0))}, tmp_path, 0, group=g)):
        assert isinstance(error, ckpt.StepRefused)
        assert "leaf w" in str(error)


def test_tied_shards_are_saved_where_one_rank_has_no_elements(tmp_path: Path) -> None:
    """Rank 1 can't detect that they are tied."""

    def state(group: Group) -> Any:
        local = np.arange(4.0) if group.rank == 0 else np.zeros(0)
        shard = ckpt.Shard(local, (4,), (4 * group.rank,))
        return {"a": shard, "b": ckpt.Shard(local, (4,), (4 * group.rank,))}

    all_well(on_ranks(2, lambda g: ckpt.save(state(g), tmp_path, 0, group=g)))
    for loaded in all_well(on_ranks(2, lambda g: ckpt.load(tmp_path, group=g))):
        assert loaded["a"].tolist() == loaded["b"].tolist() == [0, 1, 2, 3]


def test_shards_of_scalars_are_not_tied(tmp_path: Path) -> None:
    ckpt.save({"a": ckpt.Shard(np.float64(1), (), ()), "b": ckpt.Shard(np.float64(2), (), ())}, tmp_path, 0)
    loaded = ckpt.load(tmp_path)
    assert (float(loaded["a"]), float(loaded["b"])) == (1, 2)
