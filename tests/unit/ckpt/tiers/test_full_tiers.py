"""Tiers that are full, limited, read-only or unusable."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore
from helpers.messages import one_line
from helpers.processes import until
from helpers.repositories import assert_all_load
from helpers.states import assert_same, state_of
from helpers.tier_folders import FullStore, TierFolders, close_as_if_failed, train, train_and_wait
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.store import Entry
from ckpt.storage.local.directory import LocalStore
from ckpt.tiers import earlier_steps


def test_a_full_repository_of_record_does_not_stop_training(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues in the nearer tiers; the failure is reported once, and again at the end."""
    store = FullStore(LocalStore(tier_folders.run))
    ck = tier_folders.open(store)
    for step in range(8):
        ck.step(step, state_of(step))
    with pytest.raises(ckpt.SaveFailed, match="the disk is full"):
        ck.wait()
    until(lambda: "could not be promoted" in caplog.text, "the warning")  # is logged after `wait` has been woken
    assert caplog.text.count("could not be promoted") == 1
    ck.step(8, state_of(8))
    with pytest.raises(ckpt.SaveFailed) as raised:
        ck.close()
    one_line(raised, "promoting to", "the disk is full")
    assert tier_folders.steps()[2] == []
    assert tier_folders.steps()[0][-1] == 8, "the nearer copy stays"
    store.full = False
    with tier_folders.open(store) as ck:
        state, start = ck.restore(state_of(0))
        assert start == 9
        assert_same(state, state_of(8))
    assert_all_load(tier_folders.run, 8)


def test_a_full_middle_tier_does_not_block_the_last(tier_folders: TierFolders) -> None:
    ck = tier_folders.open(near=FullStore(LocalStore(tier_folders.nvme)))
    train(ck, range(7))
    with pytest.raises(ckpt.SaveFailed, match=r"promoting to .*nvme.*the disk is full"):
        ck.close()
    assert tier_folders.steps()[1:] == [[], [3, 6]]
    assert_all_load(tier_folders.run, 6)


@pytest.mark.parametrize("method", ["put", "put_new", "create", "append", "commit", "list"])
def test_a_promotion_that_fails_once_is_tried_again(tier_folders: TierFolders, method: str) -> None:
    store = FailingStore(LocalStore(tier_folders.run))
    with tier_folders.open(store) as ck:
        train(ck, range(3))
        ck.wait()
        store._method, store._at = method, store.calls.get(method, 0) + 1
        ck.step(3, state_of(3))
        ck._require_open().wait()
        for _ in range(2):
            try:
                ck.wait()
            except ckpt.SaveFailed as error:
                assert "injected" in str(error)
        assert store.failed
        ck.wait()
        assert tier_folders.steps()[2] == [3]
    tier_folders.check()


@pytest.mark.slow
def test_steps_that_are_too_fast_for_promotion_are_skipped(tier_folders: TierFolders) -> None:
    """The newest step is promoted next, and a step that is being copied is not deleted."""
    store = FullStore(LocalStore(tier_folders.run))
    store.full = False
    store.gate.clear()
    with tier_folders.open(store, every=1) as ck:
        train(ck, range(1))
        while not store.began:
            threading.Event().wait(0.001)
        for step in range(1, 8):
            ck.step(step, state_of(step)).result()
        until(lambda: 7 in tier_folders.steps()[1], "the disk has all of its steps")  # memory keeps a step that is due there
        ck.step(8, state_of(8)).result()
        until(lambda: not {1, 3, 5} & set(tier_folders.steps()[0]), "the steps between are deleted")
        assert {0, 7, 8} <= set(tier_folders.steps()[0]), "step 0 is being copied, step 8 waits"
        store.gate.set()
        ck.wait()
        assert tier_folders.steps()[2] == [0, 8]
    tier_folders.check()


def test_a_save_to_a_full_near_tier_goes_to_the_next(tier_folders: TierFolders, caplog: pytest.LogCaptureFixture) -> None:
    """In the background that step is lost and the next one goes to the next tier; with `blocking` no step is lost."""
    store = FullStore(LocalStore(tier_folders.base / "near"))
    with ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier(store)], group=None) as ck:
        ck.save(0, state_of(0), blocking=True)
        assert ckpt.open(tier_folders.run).steps() == [0]
        assert caplog.text.count("could not be saved to the tier") == 1
        ck.step(1, state_of(1))
        ck.wait()
        assert ckpt.open(tier_folders.run).steps() == [0, 1]
        store.full = False
        ck.step(2, state_of(2))
        ck.step(3, state_of(3))
        assert ckpt.open(tier_folders.base / "near").steps()[-1:] in ([2], [3])
    assert assert_all_load(tier_folders.run, 3) == [0, 1, 3]


@pytest.mark.slow
def test_saves_beyond_a_really_full_tmpfs_succeed(
    tier_folders: TierFolders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier is on a file system that is really full."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting needs root")
    try:
        with ckpt.Checkpointer(tier_folders.run, every=100, tiers=[ckpt.Tier(small / "t", keep=5)], group=None) as ck:
            for step in range(12):
                ck.save(step, state_of(step), blocking=True)
            assert ck.repository.steps() == list(range(12))
        assert "the disk is full" in caplog.text
        assert_all_load(tier_folders.run, 11)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_tier_keeps_to_its_limit(tier_folders: TierFolders, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that do not fit go to the next tier, and a warning says so."""
    tiers = [ckpt.Tier("memory", limit=300_000), ckpt.Tier(tier_folders.nvme, every=100)]
    with ckpt.Checkpointer(tier_folders.run, every=None, tiers=tiers, group=None) as ck:
        for step in range(9):
            ck.step(step, state_of(step)).result()
            stored = sum(path.stat().st_size for path in tier_folders.memory.glob("steps/**/*.*"))
            assert stored <= 300_000
        assert set(ck.repository.steps()) >= {7, 8}
        assert set(tier_folders.steps()[1]), "some continued to the next"
        assert "of at most 0.000 GB" in caplog.text
        assert "higher limit=" in caplog.text
    assert_all_load(tier_folders.run, 8)


def test_copies_keep_to_the_limit_of_their_tier(tier_folders: TierFolders, caplog: pytest.LogCaptureFixture) -> None:
    tiers = [ckpt.Tier("memory", keep=2), ckpt.Tier(tier_folders.nvme, every=1, keep=None, limit=300_000)]
    with ckpt.Checkpointer(tier_folders.run, every=None, tiers=tiers, group=None) as ck:
        for step in range(9):
            ck.step(step, state_of(step))
            ck.wait()
            assert sum(path.stat().st_size for path in tier_folders.nvme.glob("steps/**/*.*")) <= 300_000
        assert 0 < len(tier_folders.steps()[1]) < 8
        assert ck.repository.steps()[-1] == 8
    assert "is not copied: " in caplog.text
    assert_all_load(tier_folders.run, 8)


def test_a_tier_whose_size_is_unknown_for_a_moment_gets_no_copy(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a new listing shows whether there is room. The further tier gets the step, and a restore does not fail."""
    near = _Unreadable(LocalStore(tier_folders.nvme))
    tiers = [ckpt.Tier("memory"), ckpt.Tier(near, every=1, limit=1)]
    with ckpt.Checkpointer(tier_folders.run, every=1, tiers=tiers, group=None) as ck:
        near.is_unreadable = True
        ck.step(0, state_of(0)).result()
        ck.wait()
        assert tier_folders.steps() == [[0], [], [0]]
        assert "step 0 is not copied: the network is down" in caplog.text
        assert ck._tiers._open_tiers[1].copier.needed_steps() == set()
        near.is_unreadable = False


def test_an_unusable_tier_is_not_used(tier_folders: TierFolders) -> None:
    """A broken disk must not stop the training."""
    tier_folders.nvme.write_text("no folder")
    with pytest.warns(UserWarning, match="the tier .*nvme is not used"):
        ck = tier_folders.open()
    with ck:
        train_and_wait(ck, range(5))
        assert ckpt.open(tier_folders.memory).steps() == [3, 4]
        assert ckpt.open(tier_folders.run).steps() == [3]
    shutil.rmtree(tier_folders.memory)
    tier_folders.memory.write_text("no folder")
    with pytest.warns(UserWarning, match="is not used"):
        ck = tier_folders.open()
    with ck:
        assert ck.restore(state_of(0))[1] == 5
        train(ck, range(5, 9))
    assert assert_all_load(tier_folders.run, 7) == [4, 7], "the interval of the repository of record, as no tier is nearer"


def test_a_read_only_tier_is_restored_from(tier_folders: TierFolders) -> None:
    """A tier of two nodes is read-only if one is lost. A step that only it has is found."""
    ck = tier_folders.open()
    train(ck, range(6))
    ck._require_open().wait()
    ck._tiers.wait_ignoring_errors()  # type: ignore[union-attr]
    close_as_if_failed(ck)
    assert [steps[-1] for steps in tier_folders.steps()] == [5, 5, 3]
    shutil.rmtree(tier_folders.memory)
    broken = FailingStore(LocalStore(tier_folders.nvme), "put_new", 1)
    with pytest.warns(UserWarning, match="the tier .*nvme is not used"):
        ck = tier_folders.open(near=broken)
    with ck:
        state, start = ck.restore(state_of(0))
        assert start == 6
        assert_same(state, state_of(5))
        train(ck, range(6, 9))
        ck.wait()
    assert broken.failed
    assert assert_all_load(tier_folders.run, 8)[-1] == 8
    tier_folders.check()


def test_a_job_that_did_nothing_ends_with_a_tier_that_can_not_be_read(tier_folders: TierFolders) -> None:
    """It neither restored nor saved a step, and the tier can't be written, either: nothing can be lost."""
    ck = tier_folders.open()
    train_and_wait(ck, range(6))
    close_as_if_failed(ck)
    near = _Unreadable(LocalStore(tier_folders.nvme), "put_new", 1)
    with pytest.warns(UserWarning, match="the tier .*nvme is not used"):
        ck = tier_folders.open(near=near)
    near.is_unreadable = True
    ck.close()
    near.is_unreadable = False
    assert assert_all_load(near, 5)[-1] == 5, "its steps stay"
    tier_folders.check()


def test_a_step_that_is_gone_before_it_is_copied_is_reported(tier_folders: TierFolders) -> None:
    """The end of the job reports that the repository of record lacks the newest step."""
    ck = tier_folders.open(every=100)
    train(ck, range(3))
    ck.wait()
    shutil.rmtree(tier_folders.memory / "steps" / "2")
    with pytest.raises(ckpt.SaveFailed, match="promoting to .*run failed: step 2 is in no nearer tier any more"):
        ck.close()


def test_a_load_does_not_fail_for_a_tier_that_cannot_be_read_now(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier job has left there is copied when the tier can be read again."""
    ck = tier_folders.open()
    train_and_wait(ck, range(7))
    close_as_if_failed(ck)
    shutil.rmtree(tier_folders.run / "steps")
    run = _Unreadable(LocalStore(tier_folders.run))
    with tier_folders.open(run) as ck:
        run.is_unreadable = True
        ck._tiers.load_ended(6)
        assert f"what earlier jobs have left is not copied to file://{tier_folders.run} yet" in caplog.text
        run.is_unreadable = False
        assert ck.restore(state_of(0))[1] == 7
        ck.wait()
        assert tier_folders.steps()[2] == [3], "the step that is due there by its number"


def test_saves_list_an_unreadable_tier_once_in_a_pause(
    tier_folders: TierFolders, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save would otherwise wait for the tier, and add a line to the log."""
    monkeypatch.setattr(earlier_steps, "CATCH_UP_PAUSE_SECONDS", 1e9)
    run = _Unreadable(LocalStore(tier_folders.run))
    with tier_folders.open(run) as ck:
        run.is_unreadable = True
        train(ck, range(2))
        assert caplog.text.count("is not copied to") == 1
        ck._tiers._earlier_steps.next_try = 0.0
        train(ck, range(2, 4))
        assert caplog.text.count("is not copied to") == 2
        run.is_unreadable = False


class _Unreadable(FailingStore):
    """Its steps cannot be listed while `is_unreadable` is set."""

    is_unreadable = False

    def list(self, prefix: str = "") -> Iterator[Entry]:
        if self.is_unreadable and prefix == "steps":
            raise Unavailable("the network is down")
        return super().list(prefix)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        if self.is_unreadable:
            raise Unavailable("the network is down")
        return super().list_folders(prefix)
