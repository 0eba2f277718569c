"""Which committed steps count as complete, and for how long that is remembered."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore
from helpers.folders import fast_folder
from helpers.states import state_of
from helpers.written_steps import commit_of

import ckpt
from ckpt.format.json_records import StepFile
from ckpt.repository import completeness
from ckpt.repository.completeness import is_complete, note_complete
from ckpt.repository.repository import Repository


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Repository]:
    """Yield a repository with step 3, of which this process remembers nothing."""
    with fast_folder(tmp_path) as folder:
        ckpt.save(state_of(3, size=50), folder, 3)
        completeness._complete_steps.clear()
        yield ckpt.open(folder)


def test_a_step_whose_tree_matches_its_manifest_is_complete(saved: Repository, caplog: pytest.LogCaptureFixture) -> None:
    assert is_complete(saved.store, saved.commit(3)) is True
    assert caplog.text == ""


def test_the_files_of_a_complete_step_are_read_once(saved: Repository) -> None:
    commit = saved.commit(3)
    assert is_complete(saved.store, commit)
    shutil.rmtree(Path(saved.url.removeprefix("file://")))
    assert is_complete(saved.store, commit)
    assert is_complete(saved.store, replace(commit, created="later"))


@pytest.mark.parametrize("field", ["manifests", "trees"])
def test_other_files_are_another_step(saved: Repository, field: str, caplog: pytest.LogCaptureFixture) -> None:
    commit = saved.commit(3)
    assert is_complete(saved.store, commit)
    other = replace(commit, **{field: (replace(getattr(commit, field)[0], digest="0" * 32),)})
    assert is_complete(saved.store, other) is False
    (record,) = caplog.records
    assert record.getMessage().startswith("step 3 counts as damaged: ")
    assert getattr(commit, field)[0].name in record.getMessage()


def test_a_step_whose_files_can_not_be_read_now_is_not_complete_yet(
    saved: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    commit = saved.commit(3)
    store = FailingStore(saved.store, "get", 1)
    with caplog.at_level(logging.WARNING, "ckpt"):
        assert is_complete(store, commit) is False
    (record,) = caplog.records
    text = "step 3 does not count as complete, because it can't be read now: "
    assert record.getMessage().startswith(text)
    assert "injected" in record.getMessage().removeprefix(text)
    assert is_complete(store, commit) is True


def test_a_step_that_this_process_has_committed_is_not_read(saved: Repository) -> None:
    commit = commit_of(9, "0-1-0")
    note_complete(commit)
    assert is_complete(saved.store, commit)


def test_only_so_many_steps_are_remembered(saved: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten, and read again."""
    monkeypatch.setattr(completeness, "_MAX_REMEMBERED", 2)
    commits = [commit_of(step, "0-1-0", (StepFile("x", 1),)) for step in (10, 11, 12)]
    for commit in commits:
        note_complete(commit)
    assert [is_complete(saved.store, commit) for commit in commits] == [False, True, True]
    for commit in commits[1:]:
        note_complete(commit)
    assert [is_complete(saved.store, commit) for commit in commits] == [False, True, True]
