"""A step that ranks save in one layout loads into any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.mesh_layouts import are_equal, layouts, part_of_rank
from helpers.processes import SOAK
from helpers.rank_threads import CountingStore, all_well, assert_equal, on_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.groups.base import Group
from ckpt.state.boxes import flat_boxes


@pytest.mark.soak
@settings(max_examples=1000 if SOAK else 40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
@given(data=st.data())
def test_any_layout_loads_into_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """numpy is the reference: a rank loads its slice of the whole array."""
    root = tmp_path_factory.mktemp("any")
    sizes = st.sampled_from([1, 2, 3, 4, 8] if SOAK else [1, 2, 3, 4])
    writers, readers = data.draw(sizes), data.draw(sizes)
    arrays, before, after = {}, {}, {}
    for i in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
        dtype = data.draw(st.sampled_from(["u1", "f4", "f8"]))
        arrays[f"x{i}"] = np.random.default_rng(i).integers(0, 255, shape).astype(dtype)
        before[f"x{i}"] = data.draw(layouts(shape, writers))
        after[f"x{i}"] = data.draw(layouts(shape, readers))

    def state(rank: int, layout: dict[str, Any], fill: bool) -> dict[str, Any]:
        return {name: part_of_rank(array, layout[name][rank], fill) for name, array in arrays.items()}

    all_well(on_ranks(writers, lambda g: ckpt.save(state(g.rank, before, True), root, 0, group=g)))
    assert_equal(ckpt.load(root, group=None), arrays)

    def load(group: Group) -> bool:
        like, expected = state(group.rank, after, False), state(group.rank, after, True)
        loaded = ckpt.load(root, like, group=group)
        return all(are_equal(loaded[name], expected[name]) for name in expected)

    assert all(all_well(on_ranks(readers, load)))


def test_sharded_arrays_without_elements_are_saved_and_loaded(tmp_path: Path) -> None:
    """No rank has any element of them."""

    def state(group: Group) -> dict[str, Any]:
        boxes = ckpt.Shard(np.zeros((0, 5), "f2"), (0, 5), (0, 0))
        return {"flat": ckpt.Shard(np.zeros(0), (3, 0), flat=0), "boxes": boxes, "copies": np.zeros((0, 7), "i4")}

    for step, size in enumerate((3, 1)):
        all_well(on_ranks(size, lambda g, step=step: ckpt.save(state(g), tmp_path, step, group=g)))
        for readers in (1, 2):
            all_well(on_ranks(readers, lambda g: ckpt.load(tmp_path, state(g), group=g)))
        expected = {"flat": np.zeros((3, 0)), "boxes": np.zeros((0, 5), "f2"), "copies": np.zeros((0, 7), "i4")}
        assert_equal(ckpt.load(tmp_path, group=None), expected)
        assert ckpt.open(tmp_path)[step].verify() == 0


@given(st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple), st.data())
def test_a_range_of_a_flattened_array_is_a_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    array = np.arange(size).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    assert [int(x) for b in boxes for x in array[b.slices()].reshape(-1)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_three_ranks_read_a_step_of_four_with_few_additional_bytes(tmp_path: Path) -> None:
    """Each block has rows of several leaves, of which two ranks need some each: each reads only its cells."""
    draw = np.random.default_rng(7)
    full = {f"w{i}": draw.integers(0, 50, (120, 40_000)).astype(np.uint8) for i in range(12)}

    def rows(rank: int, size: int, fill: bool) -> dict[str, Any]:
        cut = slice(120 * rank // size, 120 * (rank + 1) // size)
        return {n: ckpt.Shard(a[cut].copy() if fill else a[cut] * 0, a.shape, (cut.start, 0)) for n, a in full.items()}

    all_well(on_ranks(4, lambda g: ckpt.save(rows(g.rank, 4, True), tmp_path, 0, group=g, codec="none")))
    unique = sum(a.nbytes for a in full.values())
    for share, most in (("auto", 1.3), (True, 1.05)):  # with whole blocks: 1.5

        def load(group: Group, share: Any = share) -> None:
            loaded = ckpt.load(CountingStore(tmp_path), rows(group.rank, 3, False), group=group, share_reads=share)
            expected = rows(group.rank, 3, True)
            assert all(np.array_equal(loaded[name].local, expected[name].local) for name in full)

        CountingStore.read = 0
        all_well(on_ranks(3, load))
        assert unique <= CountingStore.read <= most * unique, (share, CountingStore.read / unique)


def test_experts_move_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Eight experts are saved by four ranks and loaded by two, one and eight, with their moments."""
    full = {f"experts.{e}.{n}": np.random.default_rng(e).standard_normal((16, 8)) for e in range(8) for n in ("w", "exp_avg")}

    def state(group: Group, fill: bool) -> dict[str, Any]:
        each = 8 // group.size
        mine = range(group.rank * each, (group.rank + 1) * each)
        return {
            name: ckpt.Shard(a.copy() if fill else np.zeros_like(a), a.shape, (0, 0))
            for name, a in full.items()
            if int(name.split(".")[1]) in mine
        }

    all_well(on_ranks(4, lambda g: ckpt.save(state(g, True), tmp_path, 0, group=g)))
    for size in (2, 1, 8):
        for loaded in all_well(on_ranks(size, lambda g: ckpt.load(tmp_path, state(g, False), group=g))):
            assert loaded
            assert all(np.array_equal(s.local, full[name]) for name, s in loaded.items())


def test_pipeline_stages_are_renumbered_by_rename(tmp_path: Path) -> None:
    """Two stages of two layers, each counted from 0, become one stage of four layers."""
    full = [np.random.default_rng(i).standard_normal((6, 4)) for i in range(4)]

    def stage(rank: int, fill: bool) -> dict[str, Any]:
        mine = [a.copy() if fill else a * 0 for a in full[2 * rank : 2 * rank + 2]]
        return {f"stage{rank}": {f"layer{i}": ckpt.Shard(a, a.shape, (0, 0)) for i, a in enumerate(mine)}}

    all_well(on_ranks(2, lambda g: ckpt.save(stage(g.rank, True), tmp_path, 0, group=g)))
    whole = {f"layer{i}": np.zeros((6, 4)) for i in range(4)}
    ckpt.load(tmp_path, whole, rename=lambda n: f"stage{int(n[5:]) // 2}.layer{int(n[5:]) % 2}")
    assert all(np.array_equal(whole[f"layer{i}"], a) for i, a in enumerate(full))
    with_patterns = {"model": {"0": np.zeros((6, 4))}}
    ckpt.load(tmp_path, with_patterns, rename={r"^model\.(\d)$": r"stage1.layer\1"})
    assert np.array_equal(with_patterns["model"]["0"], full[2])
    with pytest.raises(ckpt.LeafNotFound, match=r"leaf layer0 of `like`, renamed to nowhere, is not in step 0"):
        ckpt.load(tmp_path, whole, rename=lambda n: "nowhere")


def test_shards_of_one_process_must_cover_the_array(tmp_path: Path) -> None:
    array = np.arange(40.0).reshape(8, 5)
    parts = [array[:3].copy(), array[3:].copy()]
    ckpt.save({"w": ckpt.Shard(parts, (8, 5), [(0, 0), (3, 0)])}, tmp_path, 0)
    assert np.array_equal(ckpt.load(tmp_path)["w"], array)
    with pytest.raises(ckpt.StepRefused, match=r"w.*\[3:8, 0:5\]"):
        ckpt.save({"w": ckpt.Shard(parts[0], (8, 5), (0, 0))}, tmp_path, 1)
    with pytest.raises(ckpt.UnsupportedLeaf, match="does not lie in an array of shape"):
        ckpt.save({"w": ckpt.Shard(parts[1], (8, 5), (4, 0))}, tmp_path, 1)
    assert ckpt.open(tmp_path).steps() == [0]
    json.dumps(ckpt.open(tmp_path)[0].commit.world_size)
