"""Many ranks save into tiers, are killed, and load into other layouts."""

from __future__ import annotations

import shutil
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import FailingStore, Injected
from helpers.rank_threads import all_well, on_ranks
from helpers.tier_folders import FullStore, TierFolders, close_as_if_failed, shard_of, train_and_wait
from helpers.tier_folders import tier_folders as tier_folders
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.format.manifest import Row
from ckpt.groups.base import Group
from ckpt.state.boxes import Box
from ckpt.storage.base.store import ALIGNMENT
from ckpt.storage.local.directory import LocalStore
from ckpt.tiers.copy_step import _copy_ranges


def test_ranks_with_an_automatic_interval_save_the_same_steps(tier_folders: TierFolders) -> None:
    def work(group: Group) -> list[int]:
        tiers = [ckpt.Tier("memory", every="auto")]
        with ckpt.Checkpointer(tier_folders.run, every=5, tiers=tiers, group=group, timeout=30) as ck:
            handles = [ck.step(step, shard_of(group.rank, 2, step)) for step in range(12)]
        return [handle.step for handle in handles if handle is not None]

    saved = all_well(on_ranks(2, work))
    assert saved[0] == saved[1]
    assert {0, 4, 9} <= set(saved[0])
    assert ckpt.open(tier_folders.run).steps()[-1] == saved[0][-1]


def test_ranks_restore_from_memory_into_other_layouts(tier_folders: TierFolders) -> None:
    def work(group: Group) -> None:
        ck = tier_folders.open(group=group)
        for step in range(6):
            ck.step(step, shard_of(group.rank, 4, step)).result()
            ck.wait()
        close_as_if_failed(ck)

    all_well(on_ranks(4, work))
    shutil.rmtree(tier_folders.run / "steps")
    assert tier_folders.steps()[0] == [4, 5]

    def reload(size: int) -> Any:
        def load(group: Group) -> None:
            ck = tier_folders.open(group=group)
            state, start = ck.restore(shard_of(group.rank, size, 0))
            assert start == 6
            assert np.array_equal(state["w"].local, shard_of(group.rank, size, 5)["w"].local)
            ck.step(6, shard_of(group.rank, size, 6))
            ck.close()

        return load

    all_well(on_ranks(2, reload(2)))
    assert np.array_equal(ckpt.load(tier_folders.run, step=6)["w"], np.arange(6400.0).reshape(64, 100) * 7)


def test_memory_freed_by_ranks_is_no_damage_to_the_next_start(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """The record of the last step stays, as a rank may still wait for it, and the next start deletes it."""

    def work(group: Group) -> int:
        with ckpt.Checkpointer(tier_folders.run, every=1, tiers=[ckpt.Tier("memory")], group=group) as ck:
            _, start = ck.restore(shard_of(group.rank, 2, 0))
            for step in range(start, start + 2):
                ck.step(step, shard_of(group.rank, 2, step))
        return start

    assert all_well(on_ranks(2, work)) == [0, 0]
    assert all_well(on_ranks(2, work)) == [2, 2]
    assert "falling back" not in caplog.text
    assert [path.parent.name for path in tier_folders.memory.rglob("commit.json")] == ["3"]


def test_ranks_agree_on_the_tier_when_one_is_full(tier_folders: TierFolders) -> None:
    """The disk of one rank is full; all ranks lose the step in this tier, and save the next one to the next tier."""
    stores = [FullStore(LocalStore(tier_folders.base / "near")) for _ in range(4)]
    for store in stores[:2] + stores[3:]:
        store.full = False

    def work(group: Group) -> None:
        tiers = [ckpt.Tier(stores[group.rank])]
        ck = ckpt.Checkpointer(tier_folders.run, every=100, tiers=tiers, group=group, timeout=30)
        for step in range(6):
            ck.step(step, shard_of(group.rank, 4, step))
        if group.rank == 2:
            stores[2].full = False
        ck.close()

    all_well(on_ranks(4, work))
    assert ckpt.open(tier_folders.run).steps()[-1] == 5
    for step in ckpt.open(tier_folders.run).steps():
        assert np.array_equal(ckpt.load(tier_folders.run, step=step)["w"], np.arange(6400.0).reshape(64, 100) * (step + 1))


def test_ranks_do_not_take_a_copied_commit_for_their_own(tier_folders: TierFolders) -> None:
    """The second save of the step goes to the tier that has the copied first one. Each tier has the same generation."""
    store = FullStore(LocalStore(tier_folders.base / "near"))
    store.full = False
    met = threading.Barrier(2)

    def work(group: Group) -> Any:
        tiers = [ckpt.Tier(store)]
        with ckpt.Checkpointer(tier_folders.run, every=None, tiers=tiers, group=group, timeout=300) as ck:
            ck.save(0, shard_of(group.rank, 2, 0), blocking=True)
            ck.wait()  # for the copy
            met.wait(600)
            store.full = True
            return ck.save(0, shard_of(group.rank, 2, 1), blocking=True).result().commit

    first, second = all_well(on_ranks(2, work))
    assert second == first


def test_ranks_save_beyond_the_limit_of_a_tier(tier_folders: TierFolders) -> None:
    def work(group: Group) -> None:
        tiers = [ckpt.Tier("memory", limit=100_000)]
        ck = ckpt.Checkpointer(tier_folders.run, every=100, tiers=tiers, group=group, timeout=30)
        for step in range(5):
            ck.step(step, shard_of(group.rank, 2, step))
        ck.close()

    all_well(on_ranks(2, work))
    assert ckpt.open(tier_folders.run).steps()[-1] == 4


def test_a_failure_of_rank_0_before_its_attempt_ends_the_wait_of_the_others(tier_folders: TierFolders) -> None:
    """Rank 0 alone needs the size of the state before it saves to a tier with a limit, and can't count this state."""
    met = threading.Barrier(2)

    def work(group: Group) -> tuple[type[Exception], str]:
        tiers = [ckpt.Tier("memory")]
        with ckpt.Checkpointer(tier_folders.run, every=None, tiers=tiers, group=group, timeout=2) as ck:
            with pytest.raises(ckpt.CkptError) as raised:
                ck.save(0, shard_of(1, 2, 0) if group.rank else {"f": lambda: 0}).result()
            met.wait(600)
            ck.save(0, shard_of(group.rank, 2, 0)).result()
        return raised.type, str(raised.value)

    first, second = all_well(on_ranks(2, work))
    assert first[0] is ckpt.UnsupportedLeaf
    assert second[0] is ckpt.StepRefused
    assert "rank 0 failed: leaf f: " in second[1]
    assert ckpt.open(tier_folders.run).steps() == [0]


def test_a_step_whose_call_raises_the_error_of_an_earlier_step_is_copied(tier_folders: TierFolders) -> None:
    """In a group, this step is saved nevertheless, so that the ranks stay in step."""

    def work(group: Group) -> None:
        tiers = [ckpt.Tier(tier_folders.nvme)]
        ck = ckpt.Checkpointer(tier_folders.run, every=None, tiers=tiers, group=group, timeout=60)
        first, second, third = (shard_of(group.rank, 2, step) for step in range(3))
        ck.save(0, first).result()
        if group.rank:
            with pytest.raises(ckpt.UnsupportedLeaf):
                ck.step(1, {"f": lambda: 0})
            ck.step(2, third)
        else:
            handle = ck.step(1, second)
            assert handle is not None
            assert handle.wait(600)
            with pytest.raises(ckpt.SaveFailed, match="saving step 1 "):
                ck.step(2, third)
        ck.close()

    all_well(on_ranks(2, work))
    assert ckpt.open(tier_folders.nvme).steps() == [0, 2]
    assert ckpt.open(tier_folders.run).steps() == [0, 2]


def test_ranks_use_the_tier_again_after_an_error_of_one_rank(tier_folders: TierFolders) -> None:
    """The others do not know whether that rank tries the next tier, unless its store is full."""
    met = threading.Barrier(2)

    def work(group: Group) -> list[int]:
        inner = LocalStore(tier_folders.nvme)
        near = FailingStore(inner, "create", 1) if group.rank else inner
        ck = ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier(near)], group=group, timeout=20)
        with pytest.raises(Injected if group.rank else ckpt.StepRefused):
            ck.save(0, shard_of(group.rank, 2, 0)).result()
        assert ck._tiers is not None
        found = [tier.saves_to_skip for tier in ck._tiers._open_tiers]
        met.wait(600)
        ck.step(1, shard_of(group.rank, 2, 1))
        ck.close()
        return found

    assert all_well(on_ranks(2, work)) == [[0, 0], [0, 0]]
    assert ckpt.open(tier_folders.nvme).steps() == ckpt.open(tier_folders.run).steps() == [1]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_ranks_agree_that_a_tier_which_rank_0_cannot_read_is_not_used(tier_folders: TierFolders, at: int) -> None:
    """Otherwise the other ranks would wait for rank 0 at this tier."""
    train_and_wait(ck := tier_folders.open(), range(2))
    close_as_if_failed(ck)

    def work(group: Group) -> list[int]:
        inner = LocalStore(tier_folders.nvme)
        near = FailingStore(inner, "list_folders", at) if group.rank == 0 else inner
        with tier_folders.open(near=near, group=group, timeout=60) as ck:
            ck.step(2, shard_of(group.rank, 2, 2)).result()
            return [len(ck._tiers._open_tiers), ck.repository.latest().step]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = all_well(on_ranks(2, work))
    assert first == second
    assert first[1] == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20_000_000)), max_size=8), st.integers(0, 40_000_000))
def test_copy_ranges_cover_a_pack(blocks: list[tuple[int, int]], rest: int) -> None:
    rows, at = [], 0
    for gap, stored in blocks:
        at += gap * ALIGNMENT
        rows.append(Row("x", "u1", (1,), Box((0,), (1,)), "p", at, stored, stored, 0, 1, None, b"", None, b""))
        at += -(-stored // ALIGNMENT) * ALIGNMENT
    nbytes = at + rest
    end = 0
    for begin, stop, row in _copy_ranges(rows, nbytes):
        assert begin == end < stop
        assert begin % ALIGNMENT == 0
        assert row is None or (row.position == begin and row.stored <= stop - begin)
        end = stop
    assert end == nbytes
