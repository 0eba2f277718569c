"""Tiers: saves go to the nearest tier, are copied whole, and are loaded from the nearest good copy."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.failing_store import FailingStore
from helpers.messages import one_line
from helpers.processes import until
from helpers.repositories import assert_all_load, files, reachable
from helpers.states import assert_same, state_of
from helpers.tier_folders import FullStore, TierFolders, close_as_if_failed, train, train_and_wait
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.repository.damage_registry import damaged_steps
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.local.directory import LocalStore
from ckpt.tiers.tier_spec import memory_folder_name
from ckpt.training.restore_step_limit import RESTORE_STEP_LIMIT_VARIABLE


def test_each_tier_keeps_its_own_steps(tier_folders: TierFolders) -> None:
    with tier_folders.open() as ck:
        train_and_wait(ck, range(10))
        assert tier_folders.steps() == [[8, 9], [7, 9], [3, 7]]
        assert ck.repository.steps() == [3, 7, 8, 9]
        tier_folders.check()  # referenced packs of earlier steps were copied, too
    assert tier_folders.steps() == [[], [7, 9], [7, 9]], (
        "the newest step is in the repository of record, and the memory is free"
    )
    assert {name.split("/")[0] for name in files(tier_folders.memory)} == {"ckpt.json", "tier.json", "generations"}
    tier_folders.check()
    for tier in (tier_folders.nvme, tier_folders.run):
        assert {name for name in files(tier) if name.startswith("steps/")} == reachable(tier)


def test_a_step_of_tiers_is_reported_as_checked_with_a_key(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run", every=None, key=b"k" * 32, tiers=[ckpt.Tier(tmp_path / "near")]) as ck:
        ck.save(1, state_of(1), blocking=True)
        newest = ck.repository.latest()
        assert newest is not None
        assert newest.protection.endswith("signature checked")
    with ckpt.Checkpointer(tmp_path / "run", every=None, tiers=[ckpt.Tier(tmp_path / "near")]) as ck:
        newest = ck.repository.latest()
        assert newest is not None
        assert "signature not checked" in newest.protection


def test_an_explicit_save_is_copied_to_all_tiers(tier_folders: TierFolders) -> None:
    with tier_folders.open(every=None) as ck:
        assert ck.save(4, state_of(4)).result().step == 4
        ck.wait()
        assert tier_folders.steps() == [[4], [4], [4]]


def test_tiers_with_an_interval_of_time_copy_the_next_step(tier_folders: TierFolders) -> None:
    """They copy the next step of a nearer tier; the newest step reaches the repository of record in any case."""
    hour, now = timedelta(hours=1), timedelta(0)
    tiers = [ckpt.Tier("memory", keep=3), ckpt.Tier(tier_folders.nvme, every=now, keep=None)]
    with ckpt.Checkpointer(tier_folders.run, every=hour, tiers=tiers, group=None) as ck:
        train_and_wait(ck, range(3))
        assert tier_folders.steps() == [[0, 1, 2], [0, 1, 2], []]
    assert tier_folders.steps() == [[], [0, 1, 2], [2]]
    tiers = [ckpt.Tier("memory", every=hour), ckpt.Tier(tier_folders.nvme, every=None)]
    with ckpt.Checkpointer(tier_folders.run, every=4, tiers=tiers, group=None) as ck:
        train(ck, range(3, 7))
        ck.wait()
        assert tier_folders.steps() == [[3], [0, 1, 2], [2, 3]], "the near tier is due because the last one is"
        ck.save(6, state_of(6))
    assert_all_load(tier_folders.run, 6)


def test_a_restart_restores_a_step_from_memory_and_promotes_it(tier_folders: TierFolders) -> None:
    ck = tier_folders.open()
    train_and_wait(ck, range(7))
    close_as_if_failed(ck)
    shutil.rmtree(tier_folders.run / "steps")  # as if killed before any promotion
    assert tier_folders.steps() == [[5, 6], [3, 5], []]
    with tier_folders.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 7
        assert_same(state, state_of(6))
        ck.wait()
        assert tier_folders.steps() == [[5, 6], [3, 5], [3]], "the step that is due there by its number"
    assert tier_folders.steps()[2] == [3, 6]
    tier_folders.check()


def test_a_restart_without_memory_uses_the_other_tiers(tier_folders: TierFolders) -> None:
    with tier_folders.open() as ck:
        train(ck, range(6))
    shutil.rmtree(tier_folders.memory)
    with tier_folders.open() as ck:
        state, start = ck.restore(state_of(0))
        assert start == 6
        assert_same(state, state_of(5))
        train(ck, range(6, 9))
    assert tier_folders.steps()[2][-1] == 8
    tier_folders.check()


def test_the_later_save_of_a_step_wins_after_a_roll_back(tier_folders: TierFolders) -> None:
    with tier_folders.open(every=1) as ck:
        for step in range(4):
            train(ck, range(step, step + 1))
            ck.wait()  # otherwise a slow copy may skip a step
    with tier_folders.open(every=8) as ck:
        ck.restore(state_of(0), step=2)
        changed = {**state_of(3), "name": "again"}
        ck.step(3, changed)
        assert_same(ck.restore(state_of(0))[0], changed)
    assert_same(ckpt.load(tier_folders.run), changed)
    with tier_folders.open() as ck:
        assert_same(ck.restore(state_of(0))[0], changed)


def test_an_earlier_save_is_not_copied_instead_of_one_that_cannot_be_read_for_a_moment(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """After a roll-back, a tier behind the nearest one still has the earlier save of this number."""
    near, later = _UnreadRecord(LocalStore(tier_folders.base / "near")), {**state_of(5), "name": "after the roll-back"}
    ck = tier_folders.open(every=None, tiers=[ckpt.Tier(near), ckpt.Tier(tier_folders.nvme, every=1)])
    train_and_wait(ck, range(6))
    close_as_if_failed(ck)
    with tier_folders.open(every=None, tiers=[ckpt.Tier(near), ckpt.Tier(tier_folders.nvme, every=None)]) as ck:
        ck.restore(state_of(0), step=4)
        ck.step(5, later).result()
        near.failures_left = near.unlisted_left = 1
        ck._tiers._promote_newest()
        with suppress(ckpt.SaveFailed):  # the second attempt, after a second, may have ended before
            ck.wait()
        assert "an earlier save of this number does not replace it" in caplog.text
    assert_same(ckpt.load(tier_folders.run), later)


def test_an_earlier_save_is_not_restored_instead_of_one_that_cannot_be_read_for_a_moment(tier_folders: TierFolders) -> None:
    """A tier that can be listed has the later save, so the earlier one of another tier is not the newest step."""
    near, later = _UnreadRecord(LocalStore(tier_folders.base / "near")), {**state_of(5), "name": "after the roll-back"}
    tiers = [ckpt.Tier(near), ckpt.Tier(tier_folders.nvme, every=1)]
    ck = tier_folders.open(every=None, tiers=tiers)
    train_and_wait(ck, range(6))
    close_as_if_failed(ck)
    with tier_folders.open(every=None, tiers=[ckpt.Tier(near), ckpt.Tier(tier_folders.nvme, every=None)]) as ck:
        ck.restore(state_of(0), step=4)
        ck.step(5, later).result()
        close_as_if_failed(ck)
    with tier_folders.open(every=None, tiers=tiers) as ck:
        near.failures_left = 1_000
        for step in (None, 5):
            with pytest.raises(StoreError, match="the network is down"):
                ck.restore(state_of(0), step=step)
        near.failures_left = 0
        assert_same(ck.restore(state_of(0))[0], later)
        ck.wait()


class _UnreadRecord(FailingStore):
    """The next reads of a commit record fail, and the next listings after such a read."""

    failures_left = 0
    unlisted_left = 0

    def get_up_to(self, name: str, limit: int) -> bytes:
        if self.failures_left and name.endswith("/commit.json"):
            self.failures_left -= 1
            raise Unavailable("the network is down")
        return super().get_up_to(name, limit)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        if self.unlisted_left and not self.failures_left:
            self.unlisted_left -= 1
            raise Unavailable("the network is down")
        return super().list_folders(prefix)


def test_a_step_that_is_saved_again_while_it_is_copied_does_not_count_as_damaged(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """The later save removes the files of the earlier one. The copy then continues with the later one."""
    store = FullStore(LocalStore(tier_folders.run))
    first, later = ({"w": np.full(50_000, value)} for value in (1.0, 2.0))
    store.full = False
    store.gate.clear()
    with tier_folders.open(store, every=None, tiers=[ckpt.Tier("memory")]) as ck:
        ck.save(5, first).result()
        until(lambda: store.began, "the copy has begun")
        ck.save(5, later).result()
        store.gate.set()
        ck.wait()
        assert not damaged_steps(ck._tiers.nearest.repo)
    assert "could not be promoted" not in caplog.text
    assert_same(ckpt.load(tier_folders.run), later)


def test_a_step_of_an_earlier_job_does_not_replace_a_later_explicit_save_that_waits(tier_folders: TierFolders) -> None:
    """A tier that could not be read at the restore is read again during the training."""
    store = FullStore(LocalStore(tier_folders.run))
    store.full = False
    store.gate.clear()
    with tier_folders.open(store, every=10, tiers=[ckpt.Tier("memory", every=1, keep=20)]) as ck:
        train(ck, range(10))
        until(lambda: store.began, "the copy of step 9 has begun")
        ck.save(13, state_of(13)).result()
        ck._tiers._earlier_steps.is_done, ck._tiers._earlier_steps.next_try = False, 0.0
        ck.step(14, state_of(14)).result()
        store.gate.set()
        ck.wait()
        assert ckpt.open(tier_folders.run).steps() == [9, 13]
        close_as_if_failed(ck)


def test_a_step_that_a_roll_back_has_abandoned_is_not_copied_later(tier_folders: TierFolders) -> None:
    """A tier could not be read at the restore, and is read again when the job has saved steps on a new training line."""
    tiers = [ckpt.Tier("memory", every=1, keep=5)]
    with tier_folders.open(every=10, tiers=tiers) as ck:
        train_and_wait(ck, range(20))
        close_as_if_failed(ck)
    shutil.rmtree(tier_folders.run / "steps/19")
    with tier_folders.open(every=10, tiers=tiers) as ck:
        ck._tiers._earlier_steps.is_done = True  # as if only the marker of a tier could not be read
        assert ck.restore(state_of(0), step=9)[1] == 10
        train_and_wait(ck, range(10, 13))
        ck._tiers._earlier_steps.is_done, ck._tiers._earlier_steps.next_try = False, 0.0
        train_and_wait(ck, range(13, 14))
        assert ckpt.open(tier_folders.run).steps() == [9]
        close_as_if_failed(ck)


def test_a_step_that_a_roll_back_abandons_while_it_waits_is_not_copied(tier_folders: TierFolders) -> None:
    """Its first copy has failed, and is retried."""
    store = FullStore(LocalStore(tier_folders.run))
    with tier_folders.open(store, every=10, tiers=[ckpt.Tier("memory", every=1, keep=None)]) as ck:
        store.full = False
        train_and_wait(ck, range(10))
        store.full = True
        train(ck, range(10, 20))
        with pytest.raises(ckpt.SaveFailed, match="the disk is full"):
            ck.wait()
        assert ck.restore(state_of(0), step=9)[1] == 10
        store.full = False
        ck.wait()
        assert ckpt.open(tier_folders.run).steps() == [9]
        close_as_if_failed(ck)


def test_steps_of_another_repository_are_refused(tier_folders: TierFolders) -> None:
    ck = tier_folders.open()
    train(ck, range(1))
    close_as_if_failed(ck)
    shutil.rmtree(tier_folders.run)
    with pytest.raises(ckpt.InvalidArgument) as raised:
        tier_folders.open()
    one_line(raised, str(tier_folders.memory), "not of the one at", "delete the folder")


@pytest.mark.parametrize(
    ("tiers", "word"),
    [
        (lambda p: [ckpt.Tier(p.run)], "have the same URL"),
        (lambda p: [ckpt.Tier("memory"), ckpt.Tier("memory")], "have the same URL"),
    ],
)
def test_two_tiers_of_one_url_are_refused(tier_folders: TierFolders, tiers: Any, word: str) -> None:
    with pytest.raises(ckpt.InvalidArgument, match=word):
        ckpt.Checkpointer(tier_folders.run, tiers=tiers(tier_folders), group=None)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("every", value) for value in (0, -1, True, 2.5, "10", "often", timedelta(seconds=-1), [1])),
        *(("keep", value) for value in (False, 1.5, "2")),
        *(("limit", value) for value in (0, -1, True, 1e9, "1GB")),
    ],
)
def test_wrong_options_of_a_tier_are_refused(argument: str, value: Any) -> None:
    say = "use a number of steps" if argument == "keep" else "use a positive number of"
    with pytest.raises(ckpt.InvalidArgument, match=re.escape(f"{argument}={value!r}: {say}")):
        ckpt.Tier("memory", **{argument: value})


def test_a_tier_must_keep_at_least_one_step() -> None:
    with pytest.raises(ckpt.InvalidArgument, match="at least the last step must be kept"):
        ckpt.Tier("memory", keep=0)


def test_right_options_of_a_tier_are_accepted() -> None:
    for every in (1, timedelta(0), timedelta(seconds=1), "auto", None):
        ckpt.Tier("memory", every=every, keep=None, limit=1)  # type: ignore[arg-type]
    assert ckpt.Tier("memory", keep=ckpt.Keep(2, every=10)).keep == ckpt.Keep(2, every=10)


def test_without_ckpt_run_memory_is_a_folder_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_MEMORY", raising=False)
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no shared memory")
    memory = Path(f"/dev/shm/ckpt-{os.getuid()}") / memory_folder_name((tmp_path / "run").as_uri())
    try:
        ck = ckpt.Checkpointer(tmp_path / "run", tiers=[ckpt.Tier("memory")], every=100, group=None)
        ck.step(0, state_of(0))
        close_as_if_failed(ck)
        assert_all_load(memory, 0)
        assert memory.parent.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(memory, ignore_errors=True)


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_failed_program_names_the_step_that_only_a_nearer_tier_has(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture, has_saved: bool
) -> None:
    with pytest.raises(ZeroDivisionError), tier_folders.open() as ck:
        ck.restore(state_of(0))
        if has_saved:
            ck.step(0, state_of(0)).result()
        raise ZeroDivisionError
    warnings = [record.getMessage() for record in caplog.records if "the same tiers" in record.getMessage()]
    text = f"step 0 is in a nearer tier, and {tier_folders.run.as_uri()} has no step: give the next job the same tiers"
    assert [message.startswith(text) for message in warnings] == [True] * has_saved


def test_steps_after_a_roll_back_by_ckpt_run_are_marked_in_all_tiers(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have bad weights, and the next save may go to any tier."""
    with tier_folders.open() as ck:
        train_and_wait(ck, range(8))
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "5")
    with tier_folders.open() as ck:
        assert ck.restore(state_of(0))[1] <= 5
        assert {7} <= set(damaged_steps(ckpt.open(tier_folders.nvme)))
        assert {7} <= set(damaged_steps(ckpt.open(tier_folders.run)))


def test_a_step_that_is_saved_again_after_a_roll_back_counts_in_all_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark of the bad step ends where the new one is copied to, too. Otherwise the tier keeps more steps than it should."""
    near, record = tmp_path / "near", tmp_path / "run"
    with ckpt.Checkpointer(record, every=1, keep=2, tiers=[ckpt.Tier(near, every=1, keep=2)], group=None) as ck:
        train_and_wait(ck, range(8))
    monkeypatch.setenv(RESTORE_STEP_LIMIT_VARIABLE, "7")
    with ckpt.Checkpointer(record, every=1, keep=2, tiers=[ckpt.Tier(near, every=1, keep=2)], group=None) as ck:
        assert ck.restore(state_of(0))[1] == 7
        assert [set(damaged_steps(ckpt.open(tier))) for tier in (near, record)] == [{7}, {7}]
        train_and_wait(ck, range(7, 9))
        assert [set(damaged_steps(ckpt.open(tier))) for tier in (near, record)] == [set(), set()]
        assert [ckpt.open(tier).steps() for tier in (near, record)] == [[7, 8], [7, 8]]


@pytest.mark.parametrize("near_every", [10, None])
def test_a_loop_that_reports_some_steps_copies_them_to_the_record(tmp_path: Path, near_every: int | None) -> None:
    """None of its numbers is one below a multiple of `every`: the first one after that is due, as without tiers."""
    tiers = [ckpt.Tier(tmp_path / "near", every=near_every, keep=2)]
    with ckpt.Checkpointer(tmp_path / "run", every=50, tiers=tiers, group=None) as ck:
        train_and_wait(ck, range(0, 130, 10))
        assert ckpt.open(tmp_path / "run").steps() == [50, 100]
        assert ckpt.open(tmp_path / "near").steps() == ([110, 120] if near_every else [50, 100])
    with ckpt.Checkpointer(tmp_path / "run", every=50, tiers=tiers, group=None) as ck:
        start = ck.restore(state_of(0))[1]
        train_and_wait(ck, range(start + 9, 170, 10))
        assert ckpt.open(tmp_path / "run").steps()[-1] == 150
