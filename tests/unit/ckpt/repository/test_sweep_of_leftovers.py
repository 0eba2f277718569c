"""The sweep of files that earlier writers left: none is deleted that one of them may still commit."""

from __future__ import annotations

import pytest
from helpers.lease_writers import Events, put_lease_record
from helpers.lease_writers import eventful_repo as eventful_repo
from helpers.lease_writers import events as events
from helpers.written_steps import attempt_files, commit_of, put_attempt, put_step

from ckpt.errors import Fenced
from ckpt.format.json_records import StepFile, encode_commit
from ckpt.repository.commit_publication import publish_commit
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.retention import sweep
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.errors import StoreError

OLDER, NEWER = "0-1-0", "0-2-0"
"""Attempts of the earlier writer, and of the one that sweeps."""


@pytest.fixture(autouse=True)
def writer_1_has_begun(repo: Repository) -> None:
    put_lease_record(repo.store, 1)


def files(repo: Repository) -> set[str]:
    """Return the files of all steps, without reservations."""
    return {entry.name for entry in repo.store.list("steps") if repo.store.exists(entry.name)}


def take_over(repo: Repository) -> WriterLease:
    """Return the lease of the writer that sweeps, after the temporary files of the earlier one."""
    lease = acquire_lease(repo)
    lease.sweep_temporaries_once()
    return lease


def test_files_that_an_earlier_writer_did_not_commit_are_deleted(repo: Repository) -> None:
    """Those of all ranks, also a report of a failure, for which nobody waits any more."""
    for attempt in (OLDER, "5-1-3"):
        put_attempt(repo.store, 1, attempt)
    repo.store.put("steps/1/part/0-1-4-failed.json", b"{}")
    sweep(repo, take_over(repo))
    assert files(repo) == set()


def test_files_of_a_newer_writer_stay(repo: Repository) -> None:
    names = put_attempt(repo.store, 1, "0-3-0")
    sweep(repo, take_over(repo))
    assert files(repo) == {*names}


def test_the_records_of_earlier_leases_are_deleted(repo: Repository) -> None:
    sweep(repo, take_over(repo))
    assert [entry.name for entry in repo.store.list("generations")] == ["generations/00000002.json"]


def test_an_earlier_writer_that_wakes_up_can_not_commit_what_was_deleted(repo: Repository, events: Events) -> None:
    """It was stopped between the confirmation of its lease and the write of the record."""
    older = WriterLease(repo, 1)
    put_attempt(repo.store, 1, OLDER)
    at = "publish" if "memory" not in repo.url else "put steps/1/commit.json"
    stopped: list[str] = []

    def wake_up() -> None:
        if not stopped and "memory" in repo.url:  # the first put is the reservation
            stopped.append("reserved")
            return
        stopped.append("confirmed")
        sweep(repo, take_over(repo))

    events.before(at, wake_up, each_time=True)
    with pytest.raises(Fenced):
        publish_commit(repo, older, commit_of(1, OLDER), lambda _: None)
    assert stopped[-1] == "confirmed"
    assert files(repo) == set()


def test_leftovers_beside_a_step_of_this_writer_are_deleted(repo: Repository) -> None:
    put_step(repo.store, 1, NEWER)
    put_attempt(repo.store, 1, OLDER)
    sweep(repo, take_over(repo))
    assert files(repo) == {commit_name(1), *attempt_files(1, NEWER)}


def test_leftovers_beside_a_step_that_an_earlier_writer_may_replace_stay(repo: Repository) -> None:
    """A bucket has no way to revoke the replacement of an object. A temporary file of a directory can be deleted."""
    put_step(repo.store, 1, OLDER)
    leftover = put_attempt(repo.store, 1, "0-1-1")
    others = put_attempt(repo.store, 2, "0-1-2")
    sweep(repo, take_over(repo))
    may_be_replaced = "memory" in repo.url
    assert files(repo) == {commit_name(1), *attempt_files(1, OLDER), *(leftover if may_be_replaced else ())}
    assert not files(repo) & {*others}


def test_a_step_that_an_earlier_writer_commits_during_the_sweep_keeps_its_files(repo: Repository, events: Events) -> None:
    names = put_attempt(repo.store, 1, OLDER)
    put_attempt(repo.store, 1, "0-1-1")
    lease = take_over(repo)
    commit = encode_commit(commit_of(1, OLDER))
    events.before("get steps/1/commit.json", lambda: repo.store.put(commit_name(1), commit))
    sweep(repo, lease)
    may_be_replaced = "memory" in repo.url
    assert files(repo) >= {commit_name(1), *names}
    assert bool(files(repo) & {*attempt_files(1, "0-1-1")}) == may_be_replaced


def test_a_record_that_can_not_be_read_protects_the_leftovers_of_its_step_and_all_packs(
    repo: Repository, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier writer may have committed it since the listing, with references to any pack."""
    names, others = put_attempt(repo.store, 1, OLDER), put_attempt(repo.store, 2, "0-1-1")
    own = put_attempt(repo.store, 3, "0-2-9")
    lease = take_over(repo)

    def fail() -> None:
        raise StoreError("no answer")

    events.before("get steps/1/commit.json", fail)
    sweep(repo, lease)
    assert files(repo) == {*names, others[2], own[2]}
    assert [record.getMessage() for record in caplog.records] == ["nothing that step 1 may need is deleted: no answer"]


def test_each_record_that_can_not_be_read_protects_its_leftovers(repo: Repository, events: Events) -> None:
    names = {name for step in (1, 2, 3) for name in put_attempt(repo.store, step, OLDER)}
    lease = take_over(repo)

    def fail() -> None:
        raise StoreError("no answer")

    for step in (1, 2, 3):
        events.before(f"get {commit_name(step)}", fail)
    sweep(repo, lease)
    assert files(repo) == names


def test_a_damaged_record_that_appears_protects_the_leftovers_of_its_step_and_all_packs(
    repo: Repository, events: Events
) -> None:
    names, others = put_attempt(repo.store, 1, OLDER), put_attempt(repo.store, 2, "0-1-1")
    lease = take_over(repo)
    events.before("get steps/1/commit.json", lambda: repo.store.put(commit_name(1), b"{" * 200))
    sweep(repo, lease)
    assert files(repo) == {commit_name(1), *names, others[2]}


def test_files_of_an_attempt_without_an_answer_stay_while_it_may_still_replace_the_step(repo: Repository) -> None:
    """Of a bucket, the request of this writer may still be on its way."""
    put_step(repo.store, 1, "0-2-1")
    lease = take_over(repo)
    names, other = put_attempt(repo.store, 1, "0-2-5"), put_attempt(repo.store, 2, "0-2-6")
    lease.begin_publication(commit_of(1, "0-2-5"))
    sweep(repo, lease)
    assert files(repo) >= {commit_name(1), *attempt_files(1, "0-2-1")}
    assert not files(repo) & {*other}
    assert bool(files(repo) & {*names}) == ("memory" in repo.url)
    lease.settle("0-2-5")
    sweep(repo, lease)
    assert files(repo) == {commit_name(1), *attempt_files(1, "0-2-1")}


def test_packs_of_other_steps_stay_while_a_record_without_an_answer_may_still_name_them(repo: Repository) -> None:
    """Step 1, whose pack the record of step 2 names, has expired meanwhile."""
    put_step(repo.store, 2, "0-2-0")
    lease = take_over(repo)
    put_attempt(repo.store, 1, "0-2-1")
    put_attempt(repo.store, 2, "0-2-5")
    pack = attempt_files(1, "0-2-1")[2]
    lease.begin_publication(commit_of(2, "0-2-5", (StepFile(pack, len(pack)),)))
    sweep(repo, lease)
    assert (pack in files(repo)) == ("memory" in repo.url)
    lease.settle("0-2-5")
    sweep(repo, lease)
    assert files(repo) == {commit_name(2), *attempt_files(2, "0-2-0")}


def test_files_of_this_writer_are_deleted_without_a_look_at_the_record(repo: Repository, events: Events) -> None:
    """Nobody else commits its attempts."""
    put_attempt(repo.store, 1, NEWER)
    lease = take_over(repo)
    events.seen.clear()
    sweep(repo, lease)
    assert not [operation for operation in events.seen if operation.startswith("get ") and "steps" in operation]
    assert files(repo) == set()
