"""All schedules of writers of one repository with few preemptions, kills and lost replies, by the product's own code."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.campaigns import CountCases
from helpers.folders import fast_folder
from helpers.processes import SOAK
from helpers.schedules import Bounds, Schedule, run_all_schedules
from helpers.writer_simulation import Takeover

from ckpt.repository import retention
from ckpt.repository.attempt import Attempt
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base.conditional_store import ConditionalStore
from ckpt.storage.local.directory import LocalStore

Writers = list[int | tuple[int, ...]]
"""For each writer the steps that it saves, or how many after the newest one."""

LAST = Keep(1)
NEXT: Writers = [1, 1]
ROLL_BACK: Writers = [1, (1,)]
"""The second writer has loaded an older state, and saves step 1 again."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as found:
        yield found


def run_schedules(kind: str, folder: Path, writers: Writers, bounds: Bounds, keep: Keep | None = LAST) -> int:
    """Run the writers in all schedules after one step was saved, and return the number of schedules.

    Fails with the steps of the first schedule that breaks a promise.
    """
    numbers = itertools.count()

    def run(schedule: Schedule) -> None:
        repository = folder / str(next(numbers))
        takeover = Takeover(kind, repository, schedule, keep)
        takeover.write(1)
        for number, steps in enumerate(writers):
            takeover.add_writer(f"writer {number}", steps)
        try:
            errors = takeover.interleaving.run()
            takeover.check()
            assert not any(errors.values()), errors
        except AssertionError as error:
            raise AssertionError(f"{error}, after these steps:\n  " + "\n  ".join(takeover.interleaving.steps)) from error
        shutil.rmtree(repository, ignore_errors=True)

    return run_all_schedules(run, bounds)


@pytest.mark.parametrize("kind", ["local", "bucket"])
@pytest.mark.parametrize("writers", [NEXT, ROLL_BACK])
@pytest.mark.parametrize("bounds", [Bounds(preemptions=1), Bounds(kills=1)])
def test_a_writer_that_is_stopped_or_killed_anywhere(kind: str, writers: Writers, bounds: Bounds, folder: Path) -> None:
    assert run_schedules(kind, folder, writers, bounds) > 30


def test_writers_that_stop_twice(folder: Path) -> None:
    assert run_schedules("bucket", folder, NEXT, Bounds(preemptions=2)) > 1000


@pytest.mark.parametrize(("kind", "steps"), [("local", 1), ("local", (1,)), ("bucket", 2), ("bucket", (2, 2, 3))])
def test_a_reply_that_is_lost_or_late(kind: str, steps: int | tuple[int, ...], folder: Path) -> None:
    assert run_schedules(kind, folder, [steps], Bounds(faults=1), None if steps == (2, 2, 3) else LAST) > 75


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: 1 to 10 minutes each")
@pytest.mark.parametrize("kind", ["local", "bucket"])
@pytest.mark.parametrize("writers", [NEXT, ROLL_BACK, [1, 1, 1]])
@pytest.mark.parametrize("bounds", [Bounds(preemptions=2), Bounds(preemptions=1, kills=1), Bounds(preemptions=1, faults=1)])
def test_writers_break_no_promise_in_many_schedules(
    kind: str, writers: Writers, bounds: Bounds, folder: Path, count_cases: CountCases
) -> None:
    count_cases(run_schedules(kind, folder, writers, bounds))


# --- faults that must be found ----------------------------------------------------------------------------------


def test_a_fenced_writer_that_deletes_its_files_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fault that the schedules found: a step of the newer writer refers to a pack of the older one."""

    def delete_files(repo: Repository, _: WriterLease, attempt: Attempt) -> None:
        repo.store.delete([e.name for e in repo.store.list(f"steps/{attempt.step}") if f"/{attempt.name}." in e.name])

    monkeypatch.setattr("helpers.writer_simulation.delete_files", delete_files)
    with pytest.raises(AssertionError, match="step 3 has lost steps/2/pack"):
        run_schedules("bucket", folder, NEXT, Bounds(preemptions=1))


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_a_record_that_is_written_after_its_files_were_deleted_is_found(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fault that the schedules found: a save failed without an answer, and the request took effect later."""
    monkeypatch.setattr(ConditionalStore, "revoke", lambda *_: True)
    monkeypatch.setattr(LocalStore, "revoke", lambda *_: True)
    with pytest.raises(AssertionError, match="has lost"):
        run_schedules(kind, folder, [1], Bounds(faults=1))


def test_an_expired_step_that_is_deleted_without_a_lease_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third fault that the schedules found: a newer writer had saved a step of the same number."""
    delete_expired, no_check = retention._delete_expired, SimpleNamespace(require_newest=lambda: None)
    monkeypatch.setattr(retention, "_delete_expired", lambda repo, _, *rest: delete_expired(repo, no_check, *rest))
    with pytest.raises(AssertionError, match="was deleted by an older writer"):
        run_schedules("bucket", folder, ROLL_BACK, Bounds(preemptions=1))


def test_files_that_are_swept_while_a_late_record_may_need_them_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request can revoke a put that replaces a record: the files stay until the record has changed."""
    monkeypatch.setattr(retention, "_only_uncommittable", lambda _, __, leftovers: leftovers)
    with pytest.raises(AssertionError, match="has lost"):
        run_schedules("bucket", folder, [(2, 2, 3)], Bounds(faults=1), None)
