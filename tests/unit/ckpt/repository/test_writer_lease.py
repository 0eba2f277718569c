"""The writer lease: its attempts, who is fenced, and what a release leaves. test_lease_takeover.py: who takes it over."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore
from helpers.forked_child import in_forked_child
from helpers.lease_writers import elsewhere, put_lease_record
from helpers.lease_writers import local_repo as local_repo
from helpers.messages import one_line
from helpers.written_steps import commit_of

from ckpt.errors import Fenced
from ckpt.format import json_records
from ckpt.groups.process_identity import this_process
from ckpt.repository.attempt import Attempt, AttemptSeries, SerialCounter
from ckpt.repository.lease_records import EndMarker, generation_name, lease_holder
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.errors import CkptError, IntegrityError, StoreError, Unavailable
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import temporary_name

ALONE = AttemptSeries(None, 0, 0, 0)


@pytest.fixture
def lease(repo: Repository) -> WriterLease:
    """Return the lease of this process."""
    return acquire_lease(repo)


def root_of(repo: Repository) -> Path:
    """Return the folder of a repository."""
    assert isinstance(repo.store, LocalStore)
    return Path(repo.store.root)


# --- users ---------------------------------------------------------------------------------------------------------


def test_the_last_of_all_users_is_the_one_that_drops_the_count_to_zero(lease: WriterLease) -> None:
    for _ in range(3):
        lease.add_user()
    assert [lease.drop_user() for _ in range(3)] == [False, False, True]


def test_no_two_groups_of_leases_that_share_serials_have_the_same_number(repo: Repository, lease: WriterLease) -> None:
    assert [lease.new_group_number() for _ in range(3)] == [0, 1, 2]
    serials = SerialCounter()
    leases = [WriterLease(repo, 3, serials=serials), WriterLease(repo, 3, serials=serials)]
    assert [each.new_group_number() for each in [*leases, leases[0]]] == [0, 1, 2]


# --- attempts ------------------------------------------------------------------------------------------------------


def test_attempts_of_a_step_are_numbered_for_each_group(lease: WriterLease) -> None:
    first, second = AttemptSeries(0, 2, 5, 0), AttemptSeries(1, 2, 50, 0)
    numbers = [lease.begin_attempt(step, series).number for step, series in
               [(7, first), (7, first), (8, first), (7, second), (7, ALONE), (7, first), (7, second)]]  # fmt: skip
    assert numbers == [5, 6, 5, 50, 0, 7, 51]


def test_the_name_of_an_attempt_has_rank_generation_and_a_new_serial(lease: WriterLease) -> None:
    attempts = [lease.begin_attempt(7, ALONE), lease.begin_attempt(7, AttemptSeries(1, 4, 0, 1000))]
    attempts.append(lease.begin_attempt(8, ALONE))
    assert attempts == [Attempt("0-1-0", 0, 1, 7, 0), Attempt("4-1-1001", 4, 1, 7, 0), Attempt("0-1-2", 0, 1, 8, 0)]
    assert [each.serial for each in attempts] == [(1, 0), (1, 1001), (1, 2)]


def test_a_serial_of_many_digits_is_read_from_the_name() -> None:
    assert Attempt("12-34-5678", 12, 34, 7, 0).serial == (34, 5678)


def test_an_attempt_knows_its_files_by_their_names() -> None:
    attempt = Attempt("0-1-1", 0, 1, 7, 0)
    own = ["pack/0-1-1-0.pack", "manifest/0-1-1.parquet", "manifest/0-1-1.json", "part/0-1-1-0-failed.json"]
    others = [
        "pack/0-1-10-0.pack",
        "manifest/0-1-10.parquet",
        "pack/10-1-1-0.pack",
        "commit.json",
        "0-1-1-0/x.pack",
        "pack/0-1-1",
    ]
    assert [name for name in [*own, *others] if attempt.has_file(f"steps/7/{name}")] == own


def test_leases_that_share_serials_give_no_name_twice(repo: Repository, tmp_path: Path) -> None:
    """The files of an attempt keep their names in the repositories of other tiers."""
    other = Repository(LocalStore(tmp_path / "near"))
    serials = SerialCounter([repo, other])
    leases = [WriterLease(repo, 3, serials=serials), WriterLease(other, 3, serials=serials)]
    assert [lease.begin_attempt(1, ALONE).name for lease in [*leases, leases[0]]] == ["0-3-0", "0-3-1", "0-3-2"]
    assert all(lease.has_shared_serials for lease in leases)
    assert not WriterLease(repo, 4).has_shared_serials


def test_the_highest_generation_is_that_of_all_repositories(repo: Repository, tmp_path: Path) -> None:
    other = Repository(LocalStore(tmp_path / "near"))
    assert SerialCounter().highest_generation == 0
    assert SerialCounter([repo, other]).highest_generation == 0
    put_lease_record(repo.store, 3)
    put_lease_record(other.store, 12)
    assert SerialCounter([repo, other]).highest_generation == 12


def test_an_attempt_is_active_with_its_packs_until_it_ends(lease: WriterLease) -> None:
    first, second = lease.begin_attempt(1, ALONE), lease.begin_attempt(2, ALONE)
    lease.pin_packs(second, iter(["a", "b"]))
    active = lease.active_attempts()
    assert active == {first.name: frozenset(), second.name: frozenset({"a", "b"})}
    lease.pin_packs(second, ["c"])
    assert lease.active_attempts()[second.name] == {"c"}
    lease.end_attempt(second)
    lease.end_attempt(second)
    assert lease.active_attempts() == {first.name: frozenset()}
    assert len(active) == 2, "the result is a copy"


def test_an_attempt_is_unsettled_from_its_publication_until_it_is_settled(lease: WriterLease) -> None:
    first, second = lease.begin_attempt(1, ALONE), lease.begin_attempt(2, ALONE)
    commit = commit_of(2, second.name)
    assert lease.unsettled_commits() == {}
    lease.begin_publication(commit_of(1, first.name))
    lease.begin_publication(commit)
    lease.settle(first.name)
    lease.settle(first.name)
    lease.end_attempt(second)
    assert lease.unsettled_commits() == {second.name: commit}


def test_temporary_files_of_killed_writers_are_removed_once(repo: Repository) -> None:
    """Other folders at the URL may belong to another repository, whose writers live."""
    lease, root = WriterLease(repo, 1), root_of(repo)
    names = ["x", *(f"{folder}/x" for folder in ("steps", "steps/1/pack", "generations", "lines", "meet", "other"))]
    paths = [Path(temporary_name(str(root / name))) for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"of a killed writer")
    lease.sweep_temporaries_once()
    assert [path for path in paths if path.exists()] == paths[-1:]
    paths[0].write_bytes(b"of this writer")
    lease.sweep_temporaries_once()
    assert paths[0].exists(), "a file of this writer is deleted"


def test_a_forked_child_has_no_lease(lease: WriterLease) -> None:
    def call() -> list[str]:
        found = []
        for work in (lease.sweep_temporaries_once, lambda: lease.begin_attempt(1, ALONE), lease.require_newest):
            try:
                work()
            except CkptError as error:
                found.append(str(error))
        return found

    messages = in_forked_child(call)
    assert len(messages) == 3
    assert call() == [], "the parent has lost its lease"
    for message in messages:
        assert f"the right to write to {lease.repo.url} belongs to process {os.getpid()}" in message
        assert message.endswith(": save from one of them, or to another URL from the child")


def test_the_release_of_a_forked_child_does_nothing(lease: WriterLease) -> None:
    assert in_forked_child(lease.release) is True
    assert lease_holder(lease.repo, 1) is not None
    assert lease.release() is True
    assert lease_holder(lease.repo, 1) is None


# --- fencing -------------------------------------------------------------------------------------------------------


def test_the_newest_writer_may_write(lease: WriterLease) -> None:
    assert lease.lease_error() is None
    lease.require_newest()


def test_a_writer_with_a_newer_lease_fences_the_older(lease: WriterLease) -> None:
    owner = elsewhere()
    put_lease_record(lease.repo.store, 4, owner)
    with pytest.raises(Fenced) as error:
        lease.require_newest()
    assert str(error.value) == (
        f"{lease.repo.url} was taken over by process 4711 on elsewhere since {owner.since} (generation 4, this process has 1); "
        "this process may not write to it any more: stop it"
    )


def test_a_newer_lease_that_was_released_fences_the_older(lease: WriterLease) -> None:
    put_lease_record(lease.repo.store, 2)
    with pytest.raises(Fenced) as error:
        lease.require_newest()
    one_line(error, f"{lease.repo.url} was taken over (generation 2, this process has 1); this process may")


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_newer_lease_whose_record_is_unreadable_fences_the_older(lease: WriterLease, is_damaged: bool) -> None:
    store = lease.repo.store
    put_lease_record(store, 2, elsewhere())
    if is_damaged:
        store.put(generation_name(2), b"{}")
    else:
        lease.repo.store = FailingStore(store, "get", 1)
    one_line(lease.lease_error(), f"{lease.repo.url} was taken over (generation 2, this process has 1); this process may")


def test_a_newer_lease_of_this_process_has_a_message_of_its_own(lease: WriterLease) -> None:
    acquire_lease(lease.repo)
    with pytest.raises(Fenced) as error:
        lease.require_newest()
    assert str(error.value) == (
        f"{lease.repo.url}: this process has also begun to save there for another group (generation 2, this group has 1); "
        "save to one URL through one group"
    )


@pytest.mark.parametrize("change", [{"host": "elsewhere", "boot": "b"}, {"started": "1"}])
def test_a_process_of_the_same_number_is_not_taken_for_this_one(lease: WriterLease, change: dict[str, str]) -> None:
    put_lease_record(lease.repo.store, 2, dataclasses.replace(this_process(), **change))
    one_line(lease.lease_error(), f"was taken over by process {os.getpid()} on ")


def test_a_repository_that_was_emptied_is_reported_as_deleted(lease: WriterLease) -> None:
    shutil.rmtree(root_of(lease.repo))
    with pytest.raises(StoreError) as error:
        lease.require_newest()
    assert str(error.value) == (
        f"{lease.repo.url}/generations/00000001.json is missing: the folder was deleted or emptied during a save, and the "
        "steps in it are lost; start the program again to save from the beginning"
    )


def test_a_record_of_the_same_number_by_another_holder_means_that_the_repository_was_recreated(lease: WriterLease) -> None:
    put_lease_record(lease.repo.store, 1, dataclasses.replace(this_process(), token="other"))
    with pytest.raises(StoreError, match="was deleted or emptied"):
        lease.require_newest()


@pytest.mark.parametrize(
    "body", [b"{}", json_records.encode("generation", {}), json_records.encode("generation", {"owner": 5})]
)
def test_a_damaged_record_does_not_fence_its_writer(lease: WriterLease, body: bytes) -> None:
    lease.repo.store.put(generation_name(1), body)
    assert lease.lease_error() is None


def test_a_record_that_the_store_does_not_return_does_not_fence_its_writer(lease: WriterLease) -> None:
    lease.repo.store = FailingStore(lease.repo.store, "get", 1)
    assert lease.lease_error() is None
    assert lease.repo.store.failed


def test_the_failure_of_a_fenced_writer_is_explained(lease: WriterLease) -> None:
    """The new writer may have deleted the files at which the save failed."""
    failure = StoreError("a file is missing")
    assert lease.explain_failure(failure) is failure
    put_lease_record(lease.repo.store, 2, elsewhere())
    explained = lease.explain_failure(failure)
    assert isinstance(explained, Fenced)
    assert explained.__cause__ is failure


@pytest.mark.parametrize("failure", [None, Unavailable("no answer"), Fenced("taken over"), IntegrityError("x"), OSError(5)])
def test_failures_that_a_takeover_does_not_cause_stay(lease: WriterLease, failure: BaseException | None) -> None:
    put_lease_record(lease.repo.store, 2, elsewhere())
    assert lease.explain_failure(failure) is failure


def test_a_failure_stays_where_the_store_does_not_answer(lease: WriterLease) -> None:
    failure = StoreError("a write failed")
    put_lease_record(lease.repo.store, 2, elsewhere())
    lease.repo.store = FailingStore(lease.repo.store, "list", 1)
    assert lease.explain_failure(failure) is failure


def test_a_failure_stays_where_the_repository_was_deleted(lease: WriterLease) -> None:
    failure = StoreError("a write failed")
    shutil.rmtree(root_of(lease.repo))
    assert lease.explain_failure(failure) is failure


# --- release -------------------------------------------------------------------------------------------------------


def record_of(repo: Repository, generation: int) -> dict[str, object]:
    """Return the record of a generation."""
    return json_records.load(repo.store, "generation", generation_name(generation))


def test_a_released_lease_keeps_its_record_without_an_owner(lease: WriterLease) -> None:
    assert lease.release() is True
    assert record_of(lease.repo, 1)["owner"] is None
    assert acquire_lease(lease.repo).generation == 2


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_release_removes_the_end_markers_of_its_ranks(lease: WriterLease, has_ranks: bool) -> None:
    """Without ranks the folder is not listed."""
    store = lease.repo.store
    markers = [EndMarker(1, 0, 1).name, EndMarker(1, 2, 3).name, EndMarker(2, 0, 1).name]
    for marker in markers:
        store.put(marker, b"")
    lease.add_user()
    lease.add_user(has_ranks=has_ranks)
    lease.add_user()
    lease.release()
    left = sorted(entry.name for entry in store.list("generations"))
    assert left == sorted([generation_name(1), *(markers[2:] if has_ranks else markers)])


def test_a_release_does_not_create_a_deleted_repository(lease: WriterLease) -> None:
    root = root_of(lease.repo)
    shutil.rmtree(root)
    assert lease.release() is True
    assert not root.exists()


def test_a_release_leaves_the_record_of_another_holder(lease: WriterLease) -> None:
    other = dataclasses.replace(elsewhere(), token="other")
    put_lease_record(lease.repo.store, 1, other)
    assert lease.release() is True
    assert lease_holder(lease.repo, 1) == other


def test_a_release_that_the_store_refuses_is_reported(lease: WriterLease, caplog: pytest.LogCaptureFixture) -> None:
    lease.repo.store = FailingStore(lease.repo.store, "put", 1)
    assert lease.release() is False
    (record,) = caplog.records
    assert (
        record.getMessage() == f"generations/00000001.json could not be released: injected: call 1 of put on {lease.repo.url}"
    )
    assert lease_holder(lease.repo, 1) is not None


def test_nothing_sweeps_temporary_files_after_a_release(lease: WriterLease) -> None:
    """The next holder of the lease may write some."""
    lease.release()
    path = Path(temporary_name(str(root_of(lease.repo) / "steps")))
    path.write_bytes(b"of the next writer")
    lease.sweep_temporaries_once()
    assert path.exists()
