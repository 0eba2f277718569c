"""Two Checkpointers of one process with the same tiers share the writer session of each tier."""

from __future__ import annotations

import pytest
from helpers.failing_store import FailingStore
from helpers.processes import until
from helpers.repositories import assert_all_load
from helpers.states import assert_same, state_of
from helpers.tier_folders import FullStore, TierFolders, close_as_if_failed, train, train_and_wait
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.storage.local.directory import LocalStore


def test_the_second_one_restores_its_steps_from_memory(tier_folders: TierFolders) -> None:
    with tier_folders.open(every=100) as first:
        with tier_folders.open(every=100) as second:
            train_and_wait(second, range(6))
            assert tier_folders.steps() == [[4, 5], [3, 5], []]
            state, start = second.restore(state_of(0))
            assert start == 6
            assert_same(state, state_of(5))
        assert tier_folders.steps()[2] == [5], "a clean end brings the newest step to the repository of record"
        state, start = first.restore(state_of(0))
        assert start == 6
        train(first, range(6, 8))
    assert assert_all_load(tier_folders.run)[-1] == 7
    tier_folders.check()


def test_the_second_one_keeps_steps_that_the_first_still_copies(tier_folders: TierFolders) -> None:
    store = FullStore(LocalStore(tier_folders.run))
    store.full = False
    store.gate.clear()
    with tier_folders.open(store, every=1) as first, tier_folders.open(every=None) as second:
        # The first one's first save would also copy a step that the second one had committed, so it comes first.
        train(first, range(1, 2))
        until(lambda: store.began, "the copy of step 1 to the repository of record begins")
        train(first, range(2, 3))
        for step in range(3, 10):
            second.step(step, state_of(step)).result()
        until(lambda: not {3, 4} & set[int]().union(*tier_folders.steps()[:2]), "newer steps replace the others")
        assert {1, 2} <= set(tier_folders.steps()[0]), "the first copies step 1, and step 2 waits"
        store.gate.set()
        first.wait()
        assert tier_folders.steps()[2] == [1, 2]
    assert assert_all_load(tier_folders.run)[-1] == 9


@pytest.mark.parametrize("trained", [range(6, 6), range(6, 7)])
def test_the_newest_step_of_a_tier_that_is_only_read_reaches_the_repository(tier_folders: TierFolders, trained: range) -> None:
    """It does not matter whether the job trains, and whether another Checkpointer of the process has the same tiers."""

    def open_with(tier: ckpt.Tier) -> ckpt.Checkpointer:
        return ckpt.Checkpointer(tier_folders.run, every=100, tiers=[tier], group=None)

    with open_with(ckpt.Tier(tier_folders.nvme, every=1, keep=2)) as ck:
        train(ck, range(6))
        ck._require_open().wait()
        close_as_if_failed(ck)
    assert ckpt.open(tier_folders.nvme).steps() == [4, 5]
    opened = []
    for _ in range(2):
        broken = FailingStore(LocalStore(tier_folders.nvme), "put_new", 1)
        with pytest.warns(UserWarning, match="the tier .*nvme is not used"):
            opened.append(open_with(ckpt.Tier(broken)))
        assert broken.failed
    with opened[0], opened[1] as ck:
        assert ck.restore(state_of(0))[1] == 6
        for step in trained:
            ck.save(step, state_of(step), blocking=True)
    assert assert_all_load(tier_folders.run)[-1] == max([5, *trained])
