"""Destinations of `like` that share memory: each byte gets one value, or the same twice, or the load is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.messages import one_line
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.block_io.read_plan import Target
from ckpt.format.manifest import Manifest
from ckpt.loading import alias_check
from ckpt.state.leaves import as_leaf

NOTHING = Manifest([], "xxh3-128", "nothing")


def check(*arrays: Any) -> None:
    """Check the arrays for aliasing as if each were the target of a leaf of its own."""
    found = [as_leaf(array) for array in arrays]
    alias_check.check_aliasing([Target(f"x{i}", leaf, None) for i, leaf in enumerate(found) if leaf], NOTHING, "step 0")


@pytest.mark.parametrize("kind", ["numpy", "torch", "module"])
def test_an_untied_step_is_refused_for_a_tied_like(tmp_path: Path, kind: str) -> None:
    zeros, ones, nines = np.zeros((64, 1024), "f4"), np.ones((64, 1024), "f4"), np.full((64, 1024), 9, "f4")
    like: Any
    if kind == "numpy":
        ckpt.save({"a": zeros, "b": ones}, tmp_path)
        like = {"a": nines, "b": nines}
    else:
        torch = pytest.importorskip("torch")
        tied = torch.from_numpy(nines)
        state: Any = {"a": torch.from_numpy(zeros), "b": torch.from_numpy(ones)}
        like = {"a": tied, "b": tied}
        if kind == "module":
            state, like = (
                torch.nn.ParameterDict({k: torch.nn.Parameter(v, requires_grad=False) for k, v in d.items()})
                for d in (state, like)
            )
        ckpt.save(state, tmp_path)
    with pytest.raises(ckpt.LeafMismatch) as raised:
        ckpt.load(tmp_path, like)
    one_line(raised, "leaf a and b of step 0", "untie", "only=")
    with ckpt.Checkpointer(tmp_path) as saver, pytest.raises(ckpt.LeafMismatch):
        saver.restore(like)
    assert (nines == 9).all()
    ckpt.load(tmp_path, like, only="b")
    assert (nines == 1).all()


def test_equal_copies_load_into_a_tied_like(tmp_path: Path) -> None:
    """The first and the last stage of a pipeline each have the embedding: two leaves with the same digests."""
    weight = np.random.default_rng(0).standard_normal((512, 1024))
    ckpt.save({"embed": weight, "head": weight.copy()}, tmp_path, 0, codec="none")
    tied = np.zeros_like(weight)
    ckpt.load(tmp_path, {"embed": tied, "head": tied})
    assert np.array_equal(tied, weight)
    changed = weight.copy()
    changed[-1, -1] += 1
    ckpt.save({"embed": weight, "head": changed}, tmp_path, 1, codec="none")
    with pytest.raises(ckpt.LeafMismatch, match="embed and head"):
        ckpt.load(tmp_path, {"embed": tied, "head": tied})
    assert np.array_equal(tied, weight)


def test_tied_leaves_are_refused_for_different_views_of_one_memory(tmp_path: Path) -> None:
    """The leaves were saved tied, but the two arrays of `like` are different views of their common memory."""
    square = np.arange(9.0).reshape(3, 3)
    ckpt.save({"a": square, "b": square}, tmp_path)
    like = np.zeros((3, 3))
    ckpt.load(tmp_path, {"a": like, "b": like})
    assert np.array_equal(like, square)
    with pytest.raises(ckpt.LeafMismatch) as raised:
        ckpt.load(tmp_path, {"a": like, "b": like.T})
    one_line(raised, "leaf a of step 0", "same memory")


def test_an_array_that_overlaps_itself_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ckpt.save({"a": np.arange(4.0)}, tmp_path)
    nine = torch.full((1,), 9, dtype=torch.float64)
    for like in (nine.expand(4), np.lib.stride_tricks.as_strided(np.full(1, 9.0), (4,), (0,))):
        with pytest.raises(ckpt.LeafMismatch) as raised:
            ckpt.load(tmp_path, {"a": like})
        one_line(raised, "leaf a", "share memory", "copy")
        assert (like == 9).all()
    ckpt.save({"a": np.arange(6.0).reshape(2, 3)}, tmp_path)
    with pytest.raises(ckpt.LeafMismatch):
        ckpt.load(tmp_path, {"a": torch.zeros(4, dtype=torch.float64).unfold(0, 3, 1)})
    one_row = torch.zeros(1, 3, dtype=torch.float64).as_strided((1, 3), (0, 1))  # no element occurs twice
    ckpt.save({"a": np.arange(3.0).reshape(1, 3)}, tmp_path)
    assert ckpt.load(tmp_path, {"a": one_row})["a"].tolist() == [[0, 1, 2]]


def test_disjoint_views_of_one_buffer_are_filled(tmp_path: Path) -> None:
    """Flat optimizers have such views: slices, columns, interleaved halves, reversed ranges, fields of a record."""

    def views(buffer: Any) -> dict[str, Any]:
        table = buffer[:400].reshape(20, 20)
        return {
            "columns": [table[:10, :7], table[:10, 7:]], "rows": table[10:], "even": buffer[400:500:2],
            "odd": buffer[401:500:2], "back": buffer[549:499:-1], "rest": ckpt.Shard(buffer[550:], (600,), flat=550),
            "begin": ckpt.Shard(np.zeros(0), (600,), flat=0),
        }  # fmt: skip

    full = np.arange(600.0)
    ckpt.save({**views(full), "rest": full, "begin": 0}, tmp_path)
    filled = np.zeros(600)
    ckpt.load(tmp_path, {**views(filled), "begin": 0})
    assert np.array_equal(filled, full)


def test_many_leaves_of_one_buffer_are_checked_in_linear_time(tmp_path: Path) -> None:
    """The number of comparisons is that of the leaves, not of pairs; an array without elements overlaps nothing."""
    table = np.zeros((3, 5_000))
    check(*(table[:, i] for i in range(5_000)))
    check(*table.reshape(-1, 3), table[1:1])
    with pytest.raises(ckpt.LeafMismatch, match="x4999 and x5000"):
        check(*(table[:, i] for i in range(5_000)), table[2, 4_999:])


SLICES = st.builds(slice, st.integers(0, 5), st.integers(0, 6), st.sampled_from([1, 2, 3, -1]))


@given(st.lists(st.tuples(SLICES, SLICES, st.booleans()), min_size=1, max_size=4))
def test_views_are_refused_only_if_an_element_occurs_twice(picks: list[tuple[slice, slice, bool]]) -> None:
    """The reference is a comparison of the element numbers of each pair of views."""
    table = np.zeros((6, 6), np.int16)
    numbers = np.arange(36).reshape(6, 6)
    views, seen = [], []
    for rows, columns, turned in picks:
        view, found = (a[rows, columns].T if turned else a[rows, columns] for a in (table, numbers))
        views.append(view)
        seen.append(set(found.reshape(-1).tolist()))
    if any(a & b for a, b in itertools.combinations(seen, 2)):
        with pytest.raises(ckpt.LeafMismatch):
            check(*views)
    else:
        check(*views)
