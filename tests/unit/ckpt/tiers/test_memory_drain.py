"""Memory is copied to the repository of record while the job that uses it still runs, and saves at the worst moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.states import assert_same, state_of
from helpers.tier_folders import TierFolders, close_as_if_failed, switch_memory_folder, train
from helpers.tier_folders import tier_folders as tier_folders

import ckpt
from ckpt.repository.repository import Repository
from ckpt.tiers import memory_drain


def open_with_memory(tier_folders: TierFolders) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(tier_folders.run, every=None, tiers=[ckpt.Tier("memory")], group=None)


def test_a_step_that_is_saved_before_the_lease_is_taken_is_copied(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = memory_drain.session_registry.enter
    ck = open_with_memory(tier_folders)
    train(ck, range(2))

    def save_and_enter(*arguments: Any) -> Any:
        monkeypatch.undo()
        ck.step(2, state_of(2)).result()
        return enter(*arguments)

    monkeypatch.setattr(memory_drain.session_registry, "enter", save_and_enter)
    assert "step 2 was brought" in memory_drain.drain(tier_folders.memory.parent)
    assert_same(ckpt.load(tier_folders.run), state_of(2))
    close_as_if_failed(ck)


def test_a_step_that_is_saved_after_the_look_does_not_replace_an_older_memory(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain has found the newer memory empty. So it copies the step of the older one, unless the job has done it."""
    older = os.environ["CKPT_MEMORY"]
    ck = open_with_memory(tier_folders)
    train(ck, range(2))
    close_as_if_failed(ck)
    newer = switch_memory_folder(tier_folders, monkeypatch)
    ck = open_with_memory(tier_folders)
    drain_repository = memory_drain._drain_repository

    def look_and_save(repo: Repository) -> Any:
        result = drain_repository(repo)
        if repo.url == newer.as_uri():
            ck.step(2, state_of(2)).result()
        return result

    monkeypatch.setattr(memory_drain, "_drain_repository", look_and_save)
    report = memory_drain.drain(newer.parent, Path(older))
    run = tier_folders.run.as_uri()
    assert report in (f"step 1 was brought from {tier_folders.memory.as_uri()} to {run}", f"{run} has step 1 already")
    assert_same(ckpt.load(tier_folders.run), state_of(1))
    close_as_if_failed(ck)


def test_memory_that_was_moved_is_copied(tier_folders: TierFolders, tmp_path: Path) -> None:
    """Its note names the place where the job used it."""
    ck = open_with_memory(tier_folders)
    train(ck, range(2))
    close_as_if_failed(ck)
    moved = shutil.move(tier_folders.memory.parent, tmp_path / "moved")
    assert "step 1 was brought" in memory_drain.drain(moved)
    assert_same(ckpt.load(tier_folders.run), state_of(1))


def test_an_older_memory_that_cannot_be_read_may_have_another_repository(
    tier_folders: TierFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer memory has steps of one repository. So the report says that the older one was not drained."""
    older = Path(os.environ["CKPT_MEMORY"])
    other = tier_folders.base / "other"
    for run in (tier_folders.run, other):
        with ckpt.Checkpointer(run, every=None, tiers=[ckpt.Tier("memory")], group=None) as ck:
            train(ck, range(2))
            close_as_if_failed(ck)
    newer = switch_memory_folder(tier_folders, monkeypatch)
    ck = open_with_memory(tier_folders)
    train(ck, range(2, 3))
    close_as_if_failed(ck)
    hidden = older.rename(older.with_name("hidden"))
    older.symlink_to(older)  # a read fails with ELOOP
    report = memory_drain.drain(newer.parent, older)
    assert "step 2 was brought" in report
    assert f"{older.as_uri()} {memory_drain.NOT_DRAINED}" in report
    older.unlink()
    hidden.rename(older)
    assert "step 1 was brought" in memory_drain.drain(newer.parent, older)
    assert_same(ckpt.load(other), state_of(1))


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_newer_step_in_an_older_memory_is_copied(tier_folders: TierFolders, rolled_back: bool) -> None:
    """The older memory did not answer for a while, so the job continued from an older step in another memory."""
    memory, older, newer = tier_folders.base / "memory", tier_folders.base / "older", tier_folders.base / "newer"
    ck = open_with_memory(tier_folders)
    train(ck, range(3))
    ck.wait()
    shutil.copytree(memory, newer)
    train(ck, range(3, 6))
    close_as_if_failed(ck)
    memory.rename(older)
    for step in range(1, 6):
        shutil.rmtree(tier_folders.run / "steps" / str(step), ignore_errors=True)
    report = memory_drain.drain_memories(newer, older, rolled_back=rolled_back)
    copied = (2,) if rolled_back else (2, 5)
    assert not report.has_failed
    assert [line.partition(" from ")[0] for line in report.text.splitlines()] == [f"step {step} was brought" for step in copied]
    assert_same(ckpt.load(tier_folders.run), state_of(copied[-1]))


def test_an_older_memory_that_does_not_answer_is_named(tier_folders: TierFolders) -> None:
    """Its steps count as lost, because a newer memory was read. The caller knows whether they may be newer."""
    ck = open_with_memory(tier_folders)
    train(ck, range(3))
    close_as_if_failed(ck)
    silent = "ckpt://127.0.0.1:1?redundancy=1x"
    report = memory_drain.drain_memories(tier_folders.base / "memory", silent)
    assert (report.has_failed, report.newest_step, report.unread) == (False, 2, (silent,))


def test_an_older_memory_without_newer_steps_is_not_copied(tier_folders: TierFolders) -> None:
    memory, older = tier_folders.base / "memory", tier_folders.base / "older"
    ck = open_with_memory(tier_folders)
    train(ck, range(3))
    ck.wait()
    shutil.copytree(memory, older)
    train(ck, range(3, 6))
    close_as_if_failed(ck)
    report = memory_drain.drain_memories(memory, older)
    assert len(report.text.splitlines()) == 1
    assert_same(ckpt.load(tier_folders.run), state_of(5))
