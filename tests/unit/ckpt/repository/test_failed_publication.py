"""After a publication has failed: whether its attempt may still be committed, and which of its files may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.folders import fast_folder
from helpers.lease_writers import Events, elsewhere, eventful_store, put_lease_record
from helpers.written_steps import commit_of, put_attempt, put_step

from ckpt.errors import Fenced
from ckpt.repository.attempt import Attempt
from ckpt.repository.commit_publication import delete_files, publish_commit, settle_attempt
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.errors import NotFound, StoreError, Unavailable
from ckpt.storage.base.store import Buffer, Version
from ckpt.storage.local.directory import LocalStore

ATTEMPT = Attempt("0-1-1", 0, 1, 7, 0)
COMMIT = commit_of(7, ATTEMPT.name)
NAME = commit_name(7)


@pytest.fixture(params=["local", "bucket"])
def repo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    """Yield a new repository."""
    with fast_folder(tmp_path) as folder:
        repo = Repository(eventful_store(request.param, folder / "run", Events()))
        repo.ensure()
        yield repo


@pytest.fixture
def lease(repo: Repository) -> WriterLease:
    """Return the lease of this process."""
    return acquire_lease(repo)


def files(repo: Repository) -> set[str]:
    """Return the files of step 7."""
    return {entry.name for entry in repo.store.list("steps/7")}


def test_an_attempt_that_is_committed_keeps_its_files(repo: Repository, lease: WriterLease) -> None:
    put_step(repo.store, 7, ATTEMPT.name)
    lease.begin_publication(COMMIT)
    assert settle_attempt(repo, lease, ATTEMPT) is True
    assert lease.unsettled_commits() == {}


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_attempt_without_a_record_is_settled(repo: Repository, lease: WriterLease, has_begun: bool) -> None:
    put_attempt(repo.store, 7, ATTEMPT.name)
    if has_begun:
        lease.begin_publication(COMMIT)
    assert settle_attempt(repo, lease, ATTEMPT) is False
    assert lease.unsettled_commits() == {}
    delete_files(repo, lease, ATTEMPT)
    assert files(repo) == set()


def test_an_attempt_that_may_still_replace_a_step_keeps_its_files(repo: Repository, lease: WriterLease) -> None:
    """The request to a bucket may still be on its way. A directory has no such requests."""
    put_step(repo.store, 7, "0-1-0")
    names = put_attempt(repo.store, 7, ATTEMPT.name)
    lease.begin_publication(COMMIT)
    assert settle_attempt(repo, lease, ATTEMPT) is False
    is_bucket = "memory" in repo.url
    assert lease.unsettled_commits() == ({ATTEMPT.name: COMMIT} if is_bucket else {})
    delete_files(repo, lease, ATTEMPT)
    assert bool(files(repo) & {*names}) == is_bucket


def test_an_attempt_that_did_not_begin_to_publish_beside_a_step_is_deleted(repo: Repository, lease: WriterLease) -> None:
    put_step(repo.store, 7, "0-1-10")
    before = files(repo)
    put_attempt(repo.store, 7, ATTEMPT.name)
    assert settle_attempt(repo, lease, ATTEMPT) is False
    delete_files(repo, lease, ATTEMPT)
    assert files(repo) == before


def test_an_attempt_in_a_deleted_repository_is_not_settled(repo: Repository, lease: WriterLease) -> None:
    repo.store.delete([entry.name for entry in repo.store.list()])
    lease.begin_publication(COMMIT)
    with pytest.raises(NotFound):
        settle_attempt(repo, lease, ATTEMPT)
    assert lease.unsettled_commits() == {ATTEMPT.name: COMMIT}


def test_a_report_of_a_failure_stays_with_the_files_of_other_attempts(repo: Repository, lease: WriterLease) -> None:
    report = f"steps/7/part/{ATTEMPT.name}-0-failed.json"
    others = {report, *put_attempt(repo.store, 7, "0-1-10")}
    repo.store.put(report, b"{}")
    put_attempt(repo.store, 7, ATTEMPT.name)
    delete_files(repo, lease, ATTEMPT)
    assert files(repo) == others


def test_a_fenced_writer_deletes_no_file_of_its_attempt(repo: Repository, lease: WriterLease) -> None:
    """The newer writer may refer to its packs."""
    names = put_attempt(repo.store, 7, ATTEMPT.name)
    put_lease_record(repo.store, 2, elsewhere())
    with pytest.raises(Fenced):
        delete_files(repo, lease, ATTEMPT)
    assert files(repo) == {*names}


class _Late(LocalStore):
    """A directory whose publication is reported as failed, and continues later, as after a timeout of a call that hung."""

    later: Callable[[], None]

    def publish(self, name: str, data: Buffer, confirm: Callable[[], None], replaces: Version | None = None) -> None:
        self.later = lambda: super(_Late, self).publish(name, data, confirm, replaces)
        raise StoreError("no answer in time")


def test_a_publication_that_was_given_up_does_not_happen_later(tmp_path: Path) -> None:
    repo = Repository(_Late(tmp_path))
    lease = acquire_lease(repo)
    with pytest.raises(StoreError, match="no answer in time"):
        publish_commit(repo, lease, commit_of(7, ATTEMPT.name), lambda _: None)
    assert isinstance(repo.store, _Late)
    with pytest.raises(Unavailable) as error:
        repo.store.later()
    assert str(error.value) == f"{repo.url}/{NAME} was not published in time; save again"
    with pytest.raises(NotFound):
        repo.record(7)
