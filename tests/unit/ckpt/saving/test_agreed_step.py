"""Ranks that name different steps, or leave one out: one error on all of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rank_threads import all_well, on_ranks, one_array

import ckpt
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup


def test_ranks_that_name_different_steps_load_none(tmp_path: Path) -> None:
    groups = ThreadGroup.make(3)
    for step in (0, 1):
        all_well(on_ranks(3, lambda g: ckpt.save(one_array(step), tmp_path, step, group=g), groups))  # noqa: B023
    like = [one_array(7) for _ in range(3)]
    found = on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], step=int(g.rank == 1), group=g), groups)
    assert isinstance(found[1], ckpt.InvalidArgument)
    assert "rank 1 of 3 was to load step 1, rank 0 step 0" in str(found[1])
    for rank in (0, 2):
        assert isinstance(found[rank], ckpt.GroupError)
        assert str(found[1]) in str(found[rank])
    assert all((state["a"] == 7).all() for state in like)
    all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], step=1, group=g), groups))


@pytest.mark.parametrize("named", [{0}, {1, 2}])
def test_ranks_of_which_some_name_no_step_load_none(tmp_path: Path, named: set[int]) -> None:
    groups = ThreadGroup.make(3)
    step_of = lambda g: 0 if g.rank in named else None  # noqa: E731
    for empty in (True, False):
        if not empty:
            all_well(on_ranks(3, lambda g: ckpt.save(one_array(0), tmp_path, 0, group=g), groups))
        like = [one_array(7) for _ in range(3)]
        found = on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], step=step_of(g), group=g), groups)  # noqa: B023
        words = ["load the newest one (step=None)", "load step 0"]
        steps = ["rank 0 step 0", "rank 0 the newest one (step=None)"]
        for rank in (1, 2):
            assert isinstance(found[rank], ckpt.InvalidArgument)
            assert f"rank {rank} of 3 was to {words[rank in named]}, {steps[0 not in named]}" in str(found[rank])
        assert isinstance(found[0], ckpt.GroupError)
        assert str(found[1]) in str(found[0])
        assert all((state["a"] == 7).all() for state in like)
    all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, like[g.rank], group=g), groups))


@pytest.mark.parametrize(("steps", "message"), [
    ((5, None, 5), "rank 1 of 3 was to save the next one (step=None), rank 0 step 5; every"),
    ((None, 5, None), "rank 1 of 3 was to save step 5, rank 0 the next one (step=None); every"),
    ((4, 5, 4), "rank 1 of 3 was to save step 5, rank 0 step 4; every"),
])  # fmt: skip
def test_ranks_that_name_different_steps_save_none(tmp_path: Path, steps: tuple[Any, ...], message: str) -> None:
    """The error is raised where the ranks first communicate; afterwards all ranks count the same steps."""
    groups = ThreadGroup.make(3)
    found = on_ranks(3, lambda g: ckpt.save(one_array(0), tmp_path, steps[g.rank], group=g), groups)
    assert isinstance(found[1], ckpt.InvalidArgument)
    for rank in range(3):
        assert message in str(found[rank])
        assert rank == 1 or isinstance(found[rank], ckpt.StepRefused)
    assert ckpt.open(tmp_path).steps() == []
    for step in (None, 4, 5, None):
        all_well(on_ranks(3, lambda g: ckpt.save(one_array(1), tmp_path, step, overwrite=True, group=g), groups))  # noqa: B023
    first = {None: 1, 4: 5, 5: 6}[steps[0]]
    assert ckpt.open(tmp_path).steps() == sorted({first, 4, 5, max(first, 5) + 1})


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_a_rank_that_skips_a_save_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture, behind: bool) -> None:
    """Where no step number is given, only the rank's own counter distinguishes a skipped save from a slow rank."""

    def train(group: Group) -> None:
        for i in range(5):
            if behind and group.rank == 1 and i == 2:
                continue
            own = {"seed": 10 * group.rank + i, "reader": ckpt.PerRank(i // 3 * group.rank), "names": [f"r{group.rank}", 1.5]}
            w = ckpt.Shard(np.full(10, i), (20,), (10 * group.rank,))
            with suppress(ckpt.RanksMissing):  # the last save, in which the rank that skipped one takes no part
                ckpt.save({"w": w, "loop": {"it": i, "epoch": 0}, **own}, tmp_path, group=group, timeout=6)

    all_well(on_ranks(2, train))
    warned = [record.getMessage() for record in caplog.records if "was the same on all ranks" in record.getMessage()]
    if not behind:
        assert ckpt.open(tmp_path).steps() == [0, 1, 2, 3, 4]
        assert not warned
        return
    assert ckpt.open(tmp_path).steps() == [0, 1, 2, 3]
    assert len(warned) == 1
    words = "loop.it was the same on all ranks in step 1 (1), and is not now (2 on rank 0; 3 on rank 1)"
    assert f"step 2: {words}" in warned[0]


@pytest.mark.parametrize(
    "states",
    [
        [{"a": [1, 2, 3]}, {"a": {"n": "rank"}}],  # another shape
        [{"it": 0, "skipped": 0}, {"it": 1, "skipped": "rank"}],  # they are in step
        [{"a": "rank"}, {"a": "rank"}], [{}, {"a": "rank"}], [{"a": 1.5}, {"a": "rank"}], [{"a": (1, 2)}, {"a": (1, "rank")}],
    ],
    ids=str,
)  # fmt: skip
def test_values_that_may_differ_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, states: list[Any]) -> None:
    """A check of plain values fails no save, and few correct states cause a warning."""

    def of_rank(node: Any, rank: int) -> Any:
        if isinstance(node, dict):
            return {key: of_rank(value, rank) for key, value in node.items()}
        return tuple(of_rank(item, rank) for item in node) if isinstance(node, tuple) else rank + 5 if node == "rank" else node

    for step, state in enumerate(states):
        all_well(on_ranks(2, lambda g, step=step, state=state: ckpt.save(of_rank(state, g.rank), tmp_path, step, group=g)))
    warned = [record for record in caplog.records if "was the same on all ranks" in record.getMessage()]
    assert len(warned) == ("(1, 2)" in str(states[0]))


def test_ranks_whose_later_steps_differ_are_named_with_their_steps(tmp_path: Path) -> None:
    """A rank that waits in vain gets an error with the step that the other rank tries to save."""
    groups = ThreadGroup.make(2)
    all_well(on_ranks(2, lambda g: ckpt.save(one_array(0), tmp_path, group=g), groups))
    with pytest.raises(ckpt.RanksMissing, match=r"has not committed step 9 within [\d.]+ s; look at its log"):
        ckpt.save(one_array(0), tmp_path, 9, group=groups[1], timeout=0.1)
    with pytest.raises(
        ckpt.RanksMissing,
        match=r"step 1 within [\d.]+ s \(rank 1 has written its part of step 9\); look at its log",
    ):
        ckpt.save(one_array(0), tmp_path, group=groups[0], timeout=0.1)
    with pytest.raises(ckpt.RanksMissing, match=r"step 10 within [\d.]+ s \(rank 0 has written its part of step 1\); look"):
        ckpt.save(one_array(0), tmp_path, group=groups[1], timeout=0.1)
