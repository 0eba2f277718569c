"""A tier whose steps can't be listed when a job begins: the restore waits for it, and its steps are not deleted early."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore
from helpers.states import assert_same, state_of
from helpers.tier_folders import TierFolders, close_as_if_failed, switch_memory_folder, train, train_and_wait
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.store import Entry
from ckpt.storage.local.directory import LocalStore
from ckpt.tiers import unlisted_tiers


class _UnlistedStore(FailingStore):
    """The next listings fail."""

    failures_left = 0

    def _fail(self) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise Unavailable("the network is down")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._fail()
        return super().list(prefix)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        self._fail()
        return super().list_folders(prefix)


def _open(tier_folders: TierFolders, near: _UnlistedStore) -> ckpt.Checkpointer:
    return tier_folders.open(every=4, tiers=[ckpt.Tier(near, keep=2)])


def _near_with_newest_steps(tier_folders: TierFolders) -> _UnlistedStore:
    """Return the store of a tier that has steps 5 and 6; the repository of record has step 3."""
    near = _UnlistedStore(LocalStore(tier_folders.base / "near"))
    ck = _open(tier_folders, near)
    train_and_wait(ck, range(7))
    close_as_if_failed(ck)
    return near


def test_a_restore_waits_until_it_can_list_the_tier_with_the_newest_step(tier_folders: TierFolders) -> None:
    near = _near_with_newest_steps(tier_folders)
    with _open(tier_folders, near) as ck:
        near.failures_left = 2
        state, start = ck.restore(state_of(0))
        assert start == 7
        assert_same(state, state_of(6))


def test_steps_of_an_unlisted_tier_stay_until_the_training_has_passed_them(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a restore that could not read them would abandon them, and `keep` deletes abandoned steps first."""
    near = _near_with_newest_steps(tier_folders)
    monkeypatch.setattr(unlisted_tiers, "LISTING_PATIENCE_SECONDS", 0.0)
    with _open(tier_folders, near) as ck:
        near.failures_left = 1_000
        with pytest.warns(UserWarning, match="can't be listed, so an older step may be restored"):
            assert ck.restore(state_of(0))[1] == 4
        near.failures_left = 0
        train_and_wait(ck, range(4, 5))
        assert {5, 6} <= {*ckpt.open(tier_folders.base / "near").steps()}
        assert_same(ckpt.load(tier_folders.base / "near", step=6), state_of(6))
        train_and_wait(ck, range(5, 10))
        assert ckpt.open(tier_folders.base / "near").steps() == [8, 9]


def test_a_job_continues_without_a_tier_that_stays_unlisted(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near = _near_with_newest_steps(tier_folders)
    monkeypatch.setattr(unlisted_tiers, "LISTING_PATIENCE_SECONDS", 0.5)
    with _open(tier_folders, near) as ck, caplog.at_level(logging.WARNING):
        near.failures_left = 1_000
        with pytest.warns(UserWarning, match="the network is down"):
            state, start = ck.restore(state_of(0))
        assert start == 4
        assert_same(state, state_of(3))
        assert "waits until it can list the steps of" in caplog.text
        near.failures_left = 0
        ck.wait()


def test_the_memory_of_an_earlier_attempt_that_was_unlisted_is_not_released_for_an_older_step(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ckpt-run` frees a memory that the job no longer reads, and with it the newest step."""
    ck = tier_folders.open(every=4, tiers=[ckpt.Tier("memory")])
    train_and_wait(ck, range(7))
    close_as_if_failed(ck)
    switch_memory_folder(tier_folders, monkeypatch)
    monkeypatch.setattr(unlisted_tiers, "LISTING_PATIENCE_SECONDS", 0.0)
    is_down, memory, list_folders = [False], tier_folders.memory, LocalStore.list_folders

    def list_or_fail(self: LocalStore, prefix: str = "") -> Iterator[str]:
        if is_down[0] and Path(self.root) == memory:
            raise Unavailable("the host does not answer")
        return list_folders(self, prefix)

    monkeypatch.setattr(LocalStore, "list_folders", list_or_fail)
    with tier_folders.open(every=4, tiers=[ckpt.Tier("memory")]) as ck:
        (previous,) = ck._tiers._previous_memories
        is_down[0] = True
        with pytest.warns(UserWarning, match="can't be listed"):
            assert ck.restore(state_of(0))[1] == 4
        train(ck, range(4, 5))
        ck.wait()
        assert ck._tiers._previous_memories == [previous]
        is_down[0] = False
        train_and_wait(ck, range(5, 6))
        assert ck._tiers._previous_memories == [previous]
        train_and_wait(ck, range(6, 7))
        assert ck._tiers._previous_memories == []
