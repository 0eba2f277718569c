"""The sweep of attempts that never committed, and its order. test_sweep_of_leftovers.py: of attempts of other writers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.failing_store import failing
from helpers.lease_writers import Events, elsewhere, put_lease_record
from helpers.swept_repositories import events, files, files_of, lease, repo
from helpers.written_steps import attempt_files, put_attempt, put_step

from ckpt.errors import Fenced
from ckpt.repository.attempt import AttemptSeries
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.retention import Keep, sweep
from ckpt.repository.writer_lease import WriterLease, acquire_lease

__all__ = ["events", "lease", "repo"]


# --- leftovers of this writer --------------------------------------------------------------------------------------


def test_files_of_attempts_that_ended_without_a_commit_are_deleted(repo: Repository, lease: WriterLease) -> None:
    put_step(repo.store, 1)
    put_attempt(repo.store, 1, "0-1-7")
    put_attempt(repo.store, 2, "0-1-8")
    sweep(repo, lease)
    assert files(repo) == files_of(1)


def test_files_of_a_running_attempt_and_its_packs_stay(repo: Repository, lease: WriterLease) -> None:
    attempt = lease.begin_attempt(2, AttemptSeries(None, 0, 0, 100))
    running, pinned, ended = (put_attempt(repo.store, 2, name) for name in (attempt.name, "0-1-7", "0-1-8"))
    lease.pin_packs(attempt, [pinned[2]])
    sweep(repo, lease)
    assert files(repo) == {*running, pinned[2]}
    assert not files(repo) & {*ended}


def test_an_attempt_that_commits_during_the_sweep_keeps_its_step(repo: Repository, lease: WriterLease, events: Events) -> None:
    attempt = lease.begin_attempt(2, AttemptSeries(None, 0, 0, 100))
    put_attempt(repo.store, 2, attempt.name)

    def commit() -> None:
        put_step(repo.store, 2, attempt.name)
        lease.end_attempt(attempt)

    events.before("list steps", commit)
    sweep(repo, lease)
    assert files(repo) == {commit_name(2), *attempt_files(2, attempt.name)}


def test_packs_to_which_another_rank_may_refer_stay(repo: Repository, lease: WriterLease) -> None:
    leftover = put_attempt(repo.store, 2, "0-1-7")
    sweep(repo, lease, protected_packs=[leftover[2]])
    assert files(repo) == {leftover[2]}


@pytest.mark.parametrize(
    "name", ["notes.txt", "pack/1.pack", "pack/0-1.pack", "other/0-1-0.pack", "pack/0-1-0", "pack/x0-1-0.pack"]
)
def test_a_file_that_is_not_of_an_attempt_stays(repo: Repository, lease: WriterLease, name: str) -> None:
    repo.store.put(f"steps/2/{name}", b"of somebody")
    sweep(repo, lease)
    assert files(repo) == {f"steps/2/{name}"}


def test_files_of_other_ranks_are_deleted_only_once_they_were_replaced(repo: Repository, lease: WriterLease) -> None:
    """Rank 0 can't see whether another rank still writes a file."""
    put_step(repo.store, 1)
    replaced, running = (put_attempt(repo.store, 1, name) for name in ("1-1-0", "10-1-0"))
    sweep(repo, lease, replaced_files=replaced)
    assert files(repo) == files_of(1) | {*running}


def test_files_of_other_ranks_are_deleted_with_their_step(repo: Repository, lease: WriterLease) -> None:
    put_step(repo.store, 1, "3-1-0")
    put_step(repo.store, 2)
    replaced = put_attempt(repo.store, 2, "1-1-5")
    running = put_attempt(repo.store, 2, "1-1-6")
    sweep(repo, lease, Keep(1), replaced_files=replaced)
    assert files(repo) == files_of(2) | {*running}


def test_a_report_of_a_failure_stays_for_slow_ranks(repo: Repository, lease: WriterLease) -> None:
    """A sweep of the next generation deletes it."""
    name = "steps/2/part/0-1-4-failed.json"
    repo.store.put(name, b"{}")
    sweep(repo, lease, replaced_files=[name])
    assert files(repo) == {name}
    lease.release()
    sweep(repo, acquire_lease(repo))
    assert files(repo) == set()


# --- the order of a sweep, and its end -----------------------------------------------------------------------------


def deletions(events: Events) -> list[str]:
    """Return the files that were deleted, in this order."""
    return [operation.removeprefix("delete ") for operation in events.seen if operation.startswith("delete ")]


def test_records_go_before_manifests_and_manifests_before_packs(repo: Repository, events: Events) -> None:
    """Then a crash at any point leaves no record without its files, and no manifest that a writer could still commit."""
    for step in (1, 2, 3):
        put_step(repo.store, step)
    put_lease_record(repo.store, 1)
    put_attempt(repo.store, 2, "0-1-7")
    lease = acquire_lease(repo)
    events.seen.clear()
    sweep(repo, lease, Keep(1))
    names = {"0-1-0": (1, 2), "0-1-7": (2,)}
    of_attempts = [name for attempt, steps in names.items() for step in steps for name in attempt_files(step, attempt)]
    assert deletions(events) == [
        commit_name(1),
        commit_name(2),
        *sorted(name for name in of_attempts if "/pack/" not in name),
        *sorted(name for name in of_attempts if "/pack/" in name),
        "generations/00000001.json",
    ]


@pytest.mark.parametrize(("point", "left"), [
    ("delete.commit", files_of(1, 2)),
    ("delete.files", files_of(1, 2) - {commit_name(1)}),
    ("delete.packs", files_of(2) | {attempt_files(1, "0-1-0")[2]}),
])  # fmt: skip
def test_the_next_sweep_deletes_what_an_interrupted_one_left(
    repo: Repository, lease: WriterLease, point: str, left: set[str]
) -> None:
    for step in (1, 2):
        put_step(repo.store, step)
    with failing(f"{point}=error"), pytest.raises(OSError, match="injected"):
        sweep(repo, lease, Keep(1))
    assert files(repo) == left
    sweep(repo, lease, Keep(1))
    assert files(repo) == files_of(2)


def test_a_writer_that_was_taken_over_deletes_no_record(repo: Repository, lease: WriterLease, events: Events) -> None:
    """The newer writer may have saved a step of this number."""
    for step in (1, 2):
        put_step(repo.store, step)
    before = files(repo)
    events.before("get steps/2/commit.json", lambda: put_lease_record(repo.store, 2, elsewhere()))
    with pytest.raises(Fenced):
        sweep(repo, lease, Keep(1))
    assert files(repo) == before


@pytest.mark.parametrize("when", ["at once", "list steps", "get steps/2/commit.json"])
def test_a_writer_that_was_taken_over_deletes_no_file(repo: Repository, lease: WriterLease, events: Events, when: str) -> None:
    for step in (1, 2):
        put_step(repo.store, step)
    put_attempt(repo.store, 2, "0-1-7")
    before = files(repo)
    take_over: Callable[[], None] = lambda: put_lease_record(repo.store, 2, elsewhere())  # noqa: E731
    if when == "at once":
        take_over()
    else:
        events.before(when, take_over)
    events.seen.clear()
    with pytest.raises(Fenced):
        sweep(repo, lease)
    if when == "at once":
        assert events.seen == ["list generations", "get generations/00000002.json"], "it reads nothing else"
    assert files(repo) == before
