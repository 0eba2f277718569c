"""Ranks that fail in different ways at once all end the load, so that none of them waits for another one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import FailingStore
from helpers.rank_threads import all_well, on_ranks

import ckpt
from ckpt.errors import GroupError, LeafNotFound
from ckpt.groups.base import Group
from ckpt.groups.threads import ThreadGroup
from ckpt.loading.rank_agreement import RemoteStoreError, run_on_all_ranks
from ckpt.storage.base.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.local.directory import LocalStore

ERRORS = (None, IntegrityError("damaged"), StoreError("full"), Unavailable("late"), LeafNotFound("no leaf"), KeyError("x"))


def reaction(result: object) -> str:
    """Return what a load does after the result of a stage: continue, try an older step, look for a deletion, or end."""
    if isinstance(result, IntegrityError):
        return "older step"
    if isinstance(result, (StoreError, RemoteStoreError)):
        return "look"
    return "end" if isinstance(result, Exception) else "continue"


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(range(len(ERRORS)), 2)))
def test_whatever_fails_on_each_rank_all_ranks_react_in_the_same_way(kinds: tuple[int, int]) -> None:
    for order in {(*kinds, 0), (kinds[1], kinds[0], 0), (0, *kinds)}:

        def work(group: Group, order: tuple[int, ...] = order) -> object:
            def stage() -> None:
                if (error := ERRORS[order[group.rank]]) is not None:
                    raise error

            return run_on_all_ranks(group, stage)

        results = on_ranks(3, work)
        assert len({reaction(result) for result in results}) == 1, results
        found = {reaction(ERRORS[i]) for i in order if i} or {"continue"}
        assert reaction(results[0]) == next(each for each in ("end", "look", "older step", "continue") if each in found)


def test_a_store_that_fails_on_one_rank_while_a_leaf_is_missing_on_another_ends_the_load_on_all_ranks(tmp_path: Path) -> None:
    groups = ThreadGroup.make(3, timeout=300)
    all_well(on_ranks(3, lambda g: ckpt.save({"a": np.ones(9)}, tmp_path, 0, group=g), groups))

    def load(group: Group) -> Any:
        store = FailingStore(LocalStore(tmp_path), "get", 1 if group.rank == 1 else 0)
        like = {"a": np.zeros(9)} | ({"b": np.zeros(1)} if group.rank == 0 else {})
        return ckpt.load(store, like, group=group)

    missing, *others = on_ranks(3, load, groups)
    assert isinstance(missing, LeafNotFound)
    for error in others:
        assert isinstance(error, GroupError)
        assert str(error).startswith("rank 0 of 3 failed, so no rank continues: LeafNotFound: leaf b of `like` is not in ")
    for loaded in all_well(on_ranks(3, lambda g: ckpt.load(tmp_path, group=g), groups)):  # the ranks still agree
        assert loaded["a"].tolist() == [1] * 9
