"""The publication of a commit record: what it replaces, and that a fenced writer replaces nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore, failing
from helpers.lease_writers import Events, elsewhere, eventful_store, put_lease_record
from helpers.lease_writers import eventful_repo as eventful_repo
from helpers.lease_writers import events as events
from helpers.written_steps import commit_of

from ckpt.errors import Fenced
from ckpt.format.json_records import MAX_RECORD_BYTES, CommitRecord, encode_commit
from ckpt.repository.commit_publication import publish_commit
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from ckpt.storage.base.conditional_store import MAX_TRIES
from ckpt.storage.base.errors import IntegrityError, NotFound, Unavailable

NAME = commit_name(7)
FIRST, SECOND, THIRD = (commit_of(7, f"0-1-{serial}") for serial in range(3))


@pytest.fixture
def lease(repo: Repository) -> WriterLease:
    """Return the lease of this process."""
    return acquire_lease(repo)


class Asked:
    """Allows that each record is replaced, and remembers these records."""

    def __init__(self) -> None:
        self.records: list[CommitRecord | None] = []

    def __call__(self, record: CommitRecord | None) -> None:
        self.records.append(record)


def refuse(record: CommitRecord | None) -> None:
    """Refuse to replace any record."""
    raise ValueError(f"{record} stays")


def before_each_publication(repo: Repository, events: Events, event: Callable[[], object]) -> None:
    """Call `event` each time before a record can become visible, after the lease was confirmed or before."""
    events.before(f"publish {NAME}" if repo.url.startswith("file") else f"put {NAME}", event, each_time=True)


def test_a_first_record_makes_the_step_exist(repo: Repository, lease: WriterLease) -> None:
    publish_commit(repo, lease, FIRST, refuse)
    assert repo.commit(7) == FIRST


def test_a_record_that_may_be_replaced_is_replaced(repo: Repository, lease: WriterLease) -> None:
    publish_commit(repo, lease, FIRST, refuse)
    asked = Asked()
    publish_commit(repo, lease, SECOND, asked)
    assert asked.records == [FIRST]
    assert repo.commit(7) == SECOND


def test_a_record_that_must_stay_is_not_replaced(repo: Repository, lease: WriterLease) -> None:
    publish_commit(repo, lease, FIRST, refuse)
    with pytest.raises(ValueError, match="stays"):
        publish_commit(repo, lease, SECOND, refuse)
    assert repo.commit(7) == FIRST


def test_a_damaged_record_may_be_replaced(repo: Repository, lease: WriterLease) -> None:
    repo.store.put(NAME, b"{" * 200)
    asked = Asked()
    publish_commit(repo, lease, FIRST, asked)
    assert asked.records == [None]
    assert repo.commit(7) == FIRST


def test_a_record_that_is_there_already_is_a_success(repo: Repository, lease: WriterLease) -> None:
    """The store has repeated a write whose answer was lost."""
    repo.store.put(NAME, encode_commit(FIRST))
    publish_commit(repo, lease, FIRST, refuse)
    assert repo.commit(7) == FIRST


def test_a_record_that_disappears_before_it_is_read_is_no_obstacle(
    repo: Repository, lease: WriterLease, events: Events
) -> None:
    repo.store.put(NAME, encode_commit(FIRST))
    events.before(f"get {NAME}", lambda: repo.store.delete([NAME]))
    asked = Asked()
    publish_commit(repo, lease, SECOND, asked)
    assert repo.commit(7) == SECOND
    assert len(asked.records) <= 1


def test_a_record_that_disappears_after_it_was_read_is_no_obstacle(
    repo: Repository, lease: WriterLease, events: Events
) -> None:
    repo.store.put(NAME, encode_commit(FIRST))

    def delete(_: CommitRecord | None) -> None:
        repo.store.delete([NAME])

    publish_commit(repo, lease, SECOND, delete)
    assert repo.commit(7) == SECOND


def test_a_record_that_changes_meanwhile_is_read_again(repo: Repository, lease: WriterLease) -> None:
    repo.store.put(NAME, encode_commit(FIRST))
    found: list[CommitRecord | None] = []

    def change(record: CommitRecord | None) -> None:
        found.append(record)
        if len(found) == 1:
            repo.store.put(NAME, encode_commit(SECOND))

    publish_commit(repo, lease, THIRD, change)
    assert found == [FIRST, SECOND]
    assert repo.commit(7) == THIRD


def test_a_record_that_changes_all_the_time_is_not_replaced(repo: Repository, lease: WriterLease) -> None:
    repo.store.put(NAME, encode_commit(FIRST))
    found: list[CommitRecord | None] = []

    def change(record: CommitRecord | None) -> None:
        found.append(record)
        repo.store.put(NAME, encode_commit(replace(SECOND, leaves=len(found))))

    with pytest.raises(Unavailable) as error:
        publish_commit(repo, lease, THIRD, change)
    assert str(error.value) == f"{repo.url}/{NAME} changes all the time; let one job save there"
    assert len(found) == MAX_TRIES


def test_a_record_longer_than_any_is_not_read(tmp_path: Path) -> None:
    repo = Repository(eventful_store("local", tmp_path, Events()))
    lease = acquire_lease(repo)
    repo.store.put(NAME, b"x")
    os.truncate(tmp_path / NAME, MAX_RECORD_BYTES + 1)
    with pytest.raises(IntegrityError, match=f"has {MAX_RECORD_BYTES + 1} bytes"):
        publish_commit(repo, lease, FIRST, Asked())


# --- the lease -----------------------------------------------------------------------------------------------------


def test_a_fenced_writer_publishes_no_first_record(repo: Repository, lease: WriterLease) -> None:
    put_lease_record(repo.store, 2, elsewhere())
    with pytest.raises(Fenced):
        publish_commit(repo, lease, FIRST, Asked())
    with pytest.raises(NotFound):
        repo.record(7)


def test_a_fenced_writer_replaces_no_record(repo: Repository, lease: WriterLease) -> None:
    repo.store.put(NAME, encode_commit(FIRST))
    asked = Asked()

    def fence(record: CommitRecord | None) -> None:
        asked(record)
        put_lease_record(repo.store, 2, elsewhere())

    with pytest.raises(Fenced):
        publish_commit(repo, lease, SECOND, fence)
    assert asked.records == [FIRST]
    assert repo.commit(7) == FIRST


def test_a_writer_that_was_fenced_during_the_publication_asks_nothing(
    repo: Repository, lease: WriterLease, events: Events
) -> None:
    """A record that its successor has published does not count as another step."""

    def succeed() -> None:
        put_lease_record(repo.store, 2, elsewhere())
        repo.store.put(NAME, encode_commit(SECOND))

    before_each_publication(repo, events, succeed)
    with pytest.raises(Fenced):
        publish_commit(repo, lease, FIRST, lambda _: pytest.fail("the record of the successor may be replaced"))
    assert repo.commit(7) == SECOND


def test_a_failure_after_the_publication_leaves_the_step(repo: Repository, lease: WriterLease) -> None:
    with failing("save.published=error"), pytest.raises(OSError, match="injected"):
        publish_commit(repo, lease, FIRST, refuse)
    assert repo.commit(7) == FIRST


def test_the_lease_is_confirmed_after_the_publication(tmp_path: Path) -> None:
    """A writer that is fenced now may not sweep, although its step exists."""
    events = Events()
    repo = Repository(eventful_store("local", tmp_path, events))
    lease = acquire_lease(repo)
    events.before(f"publish {NAME}, confirmed", lambda: put_lease_record(repo.store, 2, elsewhere()))
    with pytest.raises(Fenced):
        publish_commit(repo, lease, FIRST, refuse)
    assert repo.commit(7) == FIRST, "the successor has not swept, so the step exists"


def test_one_save_of_a_step_waits_for_the_result_of_another(repo: Repository, lease: WriterLease) -> None:
    asked = Asked()
    other = threading.Thread(target=publish_commit, args=(repo, lease, SECOND, asked))
    with lease.publish_lock:
        other.start()
        other.join(0.05)
        assert other.is_alive(), "the publications are not one after the other"
        repo.store.put(NAME, encode_commit(FIRST))
    other.join(600)
    assert asked.records == [FIRST]
    assert repo.commit(7) == SECOND


def test_other_errors_of_the_store_are_raised(tmp_path: Path) -> None:
    store = eventful_store("local", tmp_path, Events())
    repo = Repository(store)
    lease = acquire_lease(repo)
    repo.store = FailingStore(store, "put_new", 1)
    with pytest.raises(Exception, match="injected: call 1 of put_new"):
        publish_commit(repo, lease, FIRST, refuse)
