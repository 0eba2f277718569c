"""The newest step of a repository, if a commit record can't be read, with and without a roll-back.

A damaged step is skipped, with a message. A step that can't be read now is never skipped if it may be the newest.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.flipped_bits import put_on_bad_sector
from helpers.rank_threads import all_well, on_ranks

import ckpt
from ckpt.api import load_newest
from ckpt.groups.base import Group, SingleProcessGroup
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import open_repository
from ckpt.storage.base.errors import IntegrityError, StoreError
from ckpt.storage.local.directory import LocalStore
from ckpt.tools.step_health import step_reports

FORK, ABANDONED, NEWEST = 2, 4, 3
"""The run has saved the steps 1 to `ABANDONED`, gone back to `FORK`, and saved `NEWEST`."""

LINE = ABANDONED + 1
"""The training line of `NEWEST`: that of the fifth writer."""


def _state(step: float) -> dict[str, np.ndarray]:
    return {"a": np.full(3, float(step))}


@pytest.fixture(name="url")
def fixture_url(tmp_path: Path) -> Path:
    for step in range(1, ABANDONED + 1):
        ckpt.save(_state(step), tmp_path, step)
    _continue_from(tmp_path, FORK, NEWEST, 103)
    assert open_repository(tmp_path).newest() == (LINE, NEWEST)
    assert _steps(tmp_path) == [ABANDONED, 1, FORK, NEWEST]
    return tmp_path


def _continue_from(url: Path, restored: int | None, step: int, value: float) -> None:
    with ckpt.Checkpointer(url, every=None, keep=None) as checkpointer:
        checkpointer.restore(_state(0), step=restored)
        checkpointer.save(step, _state(value), blocking=True)


def _steps(url: Path) -> list[int]:
    return ckpt.open(url).steps()


def _damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _make_unreadable(file: Path) -> None:
    shutil.move(file, file.with_suffix(".moved"))
    file.symlink_to(file.name)  # open(2) fails with ELOOP


def _make_readable(file: Path) -> None:
    file.unlink()
    shutil.move(file.with_suffix(".moved"), file)


def _record(url: Path, step: int) -> Path:
    return url / commit_name(step)


def test_if_the_first_step_after_a_roll_back_is_damaged_a_load_falls_back_along_the_history(url: Path) -> None:
    _damage(_record(url, NEWEST))
    with pytest.warns(UserWarning, match=f"is damaged, so the older step {FORK} was loaded"):
        assert ckpt.load(url)["a"][0] == FORK
    with pytest.raises(IntegrityError):
        ckpt.load(url, strict=True)
    latest = ckpt.open(url).latest()
    assert latest is not None
    assert latest.step == FORK
    assert open_repository(url).newest() == (0, FORK)
    assert _steps(url) == [ABANDONED, 1, FORK]


def test_after_such_a_fallback_the_run_continues_on_its_line(url: Path) -> None:
    _damage(_record(url, NEWEST))
    with pytest.warns(UserWarning, match="so the older step"):
        _continue_from(url, None, NEWEST, 203)
    assert open_repository(url).newest() == (LINE, NEWEST)
    assert _steps(url) == [ABANDONED, 1, FORK, NEWEST]
    assert ckpt.load(url)["a"][0] == 203


def test_if_all_steps_are_damaged_the_next_save_is_the_newest(url: Path) -> None:
    for step in (1, FORK, NEWEST, ABANDONED):
        _damage(_record(url, step))
    ckpt.save(_state(7), url, 1, overwrite=True)
    assert open_repository(url).newest() == (LINE + 1, 1)
    with pytest.warns(UserWarning, match="is damaged, so the older step 1 was loaded"):
        assert ckpt.load(url)["a"][0] == 7


def test_a_step_that_cannot_be_read_now_may_be_the_newest(url: Path) -> None:
    _make_unreadable(_record(url, NEWEST))
    repo = ckpt.open(url)
    for ask in (repo.newest, repo.latest, repo.steps, lambda: [*repo.commits()], lambda: ckpt.load(url)):
        with pytest.raises(StoreError, match=f"steps/{NEWEST}/commit.json"):
            ask()
    _make_readable(_record(url, NEWEST))
    assert repo.newest() == (LINE, NEWEST)
    assert ckpt.load(url)["a"][0] == 103


def test_an_older_step_that_cannot_be_read_now_stops_nothing(url: Path) -> None:
    for step in (1, FORK):
        _make_unreadable(_record(url, step))
    repo = open_repository(url)
    assert repo.newest() == (LINE, NEWEST)
    latest = repo.latest()
    assert latest is not None
    assert latest.step == NEWEST
    assert ckpt.load(url)["a"][0] == 103
    _continue_from(url, None, NEWEST + 2, 105)
    assert repo.newest() == (LINE, NEWEST + 2)


def test_a_save_fails_while_it_is_unknown_whether_it_continues_the_newest_step(url: Path) -> None:
    """If the unread step is the newest, a save after another restored step is a roll-back."""
    with ckpt.Checkpointer(url, every=None, keep=None) as checkpointer:
        checkpointer.restore(_state(0), step=FORK)
        _make_unreadable(_record(url, NEWEST))
        with pytest.raises(ckpt.CkptError, match=f"steps/{NEWEST}/commit.json"):
            checkpointer.save(ABANDONED + 1, _state(5), blocking=True)
        _make_readable(_record(url, NEWEST))
        checkpointer.save(ABANDONED + 1, _state(5), blocking=True)
    order = open_repository(url).order()
    assert order.steps[-1] == ABANDONED + 1
    assert order.abandoned == {ABANDONED, NEWEST}


def test_without_the_record_of_the_newest_line_its_history_is_unknown(url: Path) -> None:
    (record,) = (url / "lines").iterdir()
    _damage(record)
    assert ckpt.load(url)["a"][0] == 103, "it is needed only if a step is unreadable"
    _damage(_record(url, NEWEST))
    with pytest.warns(UserWarning, match=f"is damaged, so the older step {ABANDONED} was loaded"):
        assert ckpt.load(url)["a"][0] == ABANDONED


class _LinesUnreadable(LocalStore):
    def get_up_to(self, name: str, limit: int) -> bytes:
        if name.startswith("lines/"):
            raise StoreError(f"reading {name} failed")
        return super().get_up_to(name, limit)


def test_a_record_of_the_newest_line_that_cannot_be_read_now_is_needed_only_if_a_step_is_unreadable(url: Path) -> None:
    store = _LinesUnreadable(str(url))
    assert ckpt.load(store)["a"][0] == 103
    _damage(_record(url, NEWEST))
    with pytest.raises(StoreError, match="reading lines/"):
        ckpt.load(store)


def test_with_one_line_a_step_that_cannot_be_read_now_is_not_skipped(tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save(_state(step), tmp_path, step)
    _make_unreadable(_record(tmp_path, 2))
    for ask in (ckpt.open(tmp_path).latest, ckpt.open(tmp_path).steps, lambda: ckpt.load(tmp_path)):
        with pytest.raises(StoreError, match="steps/2/commit.json"):
            ask()
    _make_readable(_record(tmp_path, 2))
    _make_unreadable(_record(tmp_path, 1))
    latest = ckpt.open(tmp_path).latest()
    assert latest is not None
    assert latest.step == 2


def test_a_commit_record_on_a_bad_sector_is_damage(tmp_path: Path) -> None:
    for step in (1, 2):
        ckpt.save(_state(step), tmp_path, step)
    put_on_bad_sector(_record(tmp_path, 2))
    with pytest.warns(UserWarning, match="is damaged, so the older step 1 was loaded: .* I/O error"):
        assert ckpt.load(tmp_path)["a"][0] == 1
    ckpt.save(_state(7), tmp_path, 2)
    assert ckpt.load(tmp_path)["a"][0] == 7, "a save replaces it, as any damaged step"
    assert _steps(tmp_path) == [1, 2]


def test_a_group_replaces_a_commit_record_on_a_bad_sector(tmp_path: Path) -> None:
    """The ranks that wait for the commit read the record before rank 0 has replaced it."""
    ckpt.save(_state(1), tmp_path, 1)
    put_on_bad_sector(_record(tmp_path, 1))

    def save(group: Group) -> ckpt.Checkpoint:
        if group.rank == 0:
            time.sleep(0.1)
        return ckpt.save(_state(5), tmp_path, 1, group=group)

    assert [checkpoint.step for checkpoint in all_well(on_ranks(2, save))] == [1, 1]
    assert ckpt.load(tmp_path)["a"][0] == 5


def test_the_report_of_a_step_whose_record_is_on_a_bad_sector_is_damaged(tmp_path: Path) -> None:
    ckpt.save(_state(1), tmp_path, 1)
    put_on_bad_sector(_record(tmp_path, 1))
    assert [report.state for report in step_reports(open_repository(tmp_path), [1])] == ["damaged"]


def test_a_restored_step_whose_record_is_damaged_meanwhile_is_no_new_run(url: Path) -> None:
    """Otherwise its steps would be set aside, as those of another run."""
    with ckpt.Checkpointer(url, every=None, keep=None) as checkpointer:
        checkpointer.restore(_state(0), step=FORK)
        data = _record(url, FORK).read_bytes()
        _damage(_record(url, FORK))
        with pytest.raises(ckpt.CkptError, match=f"steps/{FORK}/commit.json is damaged"):
            checkpointer.save(ABANDONED + 1, _state(5), blocking=True)
        _record(url, FORK).write_bytes(data)
        checkpointer.save(ABANDONED + 1, _state(5), blocking=True)
    assert open_repository(url).order().set_aside == frozenset()


def test_the_record_of_another_step_is_damage_in_every_listing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(_state(step), tmp_path, step)
    shutil.copy(_record(tmp_path, 1), _record(tmp_path, 2))
    repo = ckpt.open(tmp_path)
    assert repo.steps() == [1, 3]
    assert 2 not in repo
    assert [commit.step for commit in repo.commits()] == [1, 3]
    assert [checkpoint.step for checkpoint in repo] == [1, 3]


def test_a_step_that_is_deleted_during_an_iteration_is_left_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(_state(step), tmp_path, step)
    found = iter(ckpt.open(tmp_path))
    assert next(found).step == 1
    shutil.rmtree(tmp_path / "steps/2")
    assert [checkpoint.step for checkpoint in found] == [3]


def test_a_load_below_a_limit_that_falls_back_above_it_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(_state(step), tmp_path, step)
    for step in (1, 2):
        _damage(_record(tmp_path, step))
    repo = ckpt.open(tmp_path)
    with pytest.warns(UserWarning, match="step 3 was loaded") as warned:
        found = load_newest(repo, False, LoadRequest(None, group=SingleProcessGroup()), 3)
    assert found is not None
    assert found[0] == 3
    assert [str(w.message).partition(":")[0] for w in warned] == [
        "step 2 is damaged, so step 3 was loaded",
        "step 1 is damaged, so step 3 was loaded",
    ]
