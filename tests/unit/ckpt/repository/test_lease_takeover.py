"""Who may take a writer lease, and what becomes of two processes that take it at the same time."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore, failing
from helpers.lease_writers import Events, dead, elsewhere, eventful_store, living, put_lease_record
from helpers.lease_writers import eventful_repo as eventful_repo
from helpers.lease_writers import events as events
from helpers.messages import one_line

from ckpt.errors import Fenced, FormatError, RepositoryBusy
from ckpt.format import json_records
from ckpt.groups.process_identity import this_process
from ckpt.repository.attempt import SerialCounter
from ckpt.repository.lease_records import generation_name, lease_holder, newest_generation
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import acquire_lease
from ckpt.storage.base.errors import NotFound, Refused, StoreError
from ckpt.storage.base.store import Buffer, Store
from ckpt.storage.local.directory import LocalStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="detects live processes by /proc")


def test_the_first_lease_has_generation_one(repo: Repository) -> None:
    lease = acquire_lease(repo)
    assert (lease.repo, lease.generation, lease.has_shared_serials) == (repo, 1, False)
    owner = lease_holder(repo, 1)
    assert owner is not None
    assert (owner.token, owner.pid) == (lease.token, this_process().pid)


def test_a_lease_gets_a_higher_generation_than_all_tiers(repo: Repository, tmp_path: Path) -> None:
    """A copied step keeps its generation, so no tier may use a number again."""
    near = Repository(LocalStore(tmp_path / "near"))
    put_lease_record(near.store, 7)
    put_lease_record(repo.store, 3)
    serials = SerialCounter([repo, near])
    lease = acquire_lease(repo, serials)
    assert (lease.generation, lease.has_shared_serials) == (8, True)
    assert serials.highest_generation == 7
    assert acquire_lease(repo).generation == 9


def test_a_lease_of_a_living_process_of_this_host_is_not_taken_over(repo: Repository) -> None:
    owner = living()
    put_lease_record(repo.store, 3, owner)
    with pytest.raises(RepositoryBusy) as error:
        acquire_lease(repo)
    assert str(error.value) == (
        f"{repo.url} is being written by process {owner.pid} on {owner.host} since {owner.since}; "
        "wait for it, stop it, or save to another URL"
    )
    assert newest_generation(repo) == 3


@pytest.mark.parametrize("owner", [lambda: None, dead, this_process])
def test_a_lease_that_nobody_uses_is_taken_over_without_a_warning(
    repo: Repository, owner: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A lease of this process is used by another of its groups, which is fenced."""
    put_lease_record(repo.store, 3, owner())
    assert acquire_lease(repo).generation == 4
    assert caplog.records == []


@pytest.mark.parametrize("pid", [4711, os.getpid()], ids=["another number", "our number"])
def test_a_lease_of_another_host_is_taken_over_with_a_warning(
    repo: Repository, caplog: pytest.LogCaptureFixture, pid: int
) -> None:
    """The main process of a container is often process 1 on each host."""
    put_lease_record(repo.store, 3, dataclasses.replace(elsewhere(), pid=pid))
    assert acquire_lease(repo).generation == 4
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"taking over {repo.url} from process {pid} on elsewhere: it may still run, but it can't commit any more"
    )


def test_a_lease_whose_record_the_store_does_not_return_is_not_taken_over(repo: Repository) -> None:
    """Its holder may live. Whoever starts the job again finds that out."""
    put_lease_record(repo.store, 3, living())
    with pytest.raises(StoreError, match="injected"):
        acquire_lease(Repository(FailingStore(repo.store, "get", 1)))
    assert newest_generation(repo) == 3


def test_a_lease_of_a_newer_version_is_not_taken_over(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(json_records, "FORMAT_VERSION", 2)
        put_lease_record(repo.store, 3, living())
    with pytest.raises(FormatError, match="install a newer ckpt-store"):
        acquire_lease(repo)
    assert newest_generation(repo) == 3


def test_a_lease_with_a_damaged_record_is_taken_over_with_a_warning(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing would ever show whether its holder lives, as with one of another host. What it commits later is refused."""
    put_lease_record(repo.store, 3, living())
    record = generation_name(3)
    repo.store.put(record, repo.store.get(record)[:-1])
    assert acquire_lease(repo).generation == 4
    (message,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert message == (
        f"taking over {repo.url} from an unknown process, because {record} is damaged: it may still run, but it can't commit "
        "any more"
    )


def test_an_older_generation_of_a_living_process_is_no_obstacle(repo: Repository) -> None:
    put_lease_record(repo.store, 3, living())
    put_lease_record(repo.store, 4)
    assert acquire_lease(repo).generation == 5


def test_the_holder_in_this_repository_counts_and_not_one_in_a_tier(repo: Repository, tmp_path: Path) -> None:
    near = Repository(LocalStore(tmp_path / "near"))
    put_lease_record(near.store, 7)
    put_lease_record(repo.store, 3, living())
    with pytest.raises(RepositoryBusy, match="is being written by process"):
        acquire_lease(repo, SerialCounter([repo, near]))


# --- two processes at the same time --------------------------------------------------------------------------------


def test_a_process_that_lost_a_number_takes_the_next(repo: Repository, events: Events) -> None:
    events.before(f"put new {generation_name(1)}", lambda: put_lease_record(repo.store, 1))
    events.before(f"put {generation_name(1)}", lambda: put_lease_record(repo.store, 1))
    assert acquire_lease(repo).generation == 2


def test_a_process_that_lost_a_number_to_a_living_one_is_refused(repo: Repository, events: Events) -> None:
    for operation in ("put new", "put"):
        events.before(f"{operation} {generation_name(1)}", lambda: put_lease_record(repo.store, 1, living()))
    with pytest.raises(RepositoryBusy, match="is being written by process"):
        acquire_lease(repo)


class _SweptOnce(LocalStore):
    """A directory whose first new object fails, because the sweep of another writer deleted its temporary file."""

    is_swept = False

    def put_new(self, name: str, data: Buffer) -> None:
        if not self.is_swept:
            self.is_swept = True
            raise NotFound(f"{name}: the temporary file is missing")
        super().put_new(name, data)


def test_a_process_whose_temporary_file_was_swept_tries_again(tmp_path: Path) -> None:
    assert acquire_lease(Repository(_SweptOnce(tmp_path))).generation == 1


class _LateListing(LocalStore):
    """A directory whose first listing is old, as one that a file system has cached."""

    is_late = True

    def list(self, prefix: str = "") -> Iterator[object]:  # type: ignore[override]
        if self.is_late:
            self.is_late = False
            return iter(())
        return super().list(prefix)


def test_a_process_that_saw_an_old_listing_takes_a_number_above_all(tmp_path: Path) -> None:
    repo = Repository(_LateListing(tmp_path))
    put_lease_record(repo.store, 5)
    assert acquire_lease(repo).generation == 6


@pytest.mark.parametrize(("losses", "outcome"), [(19, 20), (20, None)])
def test_a_process_gives_up_after_it_has_lost_twenty_numbers(tmp_path: Path, losses: int, outcome: int | None) -> None:
    events = Events()
    repo = Repository(eventful_store("local", tmp_path / "run", events))
    lost: list[int] = []

    def lose() -> None:
        if len(lost) < losses:
            lost.append(len(lost) + 1)
            put_lease_record(repo.store, lost[-1])

    events.before("put new generations/", lose, each_time=True)
    if outcome is not None:
        assert acquire_lease(repo).generation == outcome
        return
    with pytest.raises(RepositoryBusy) as error:
        acquire_lease(repo)
    assert str(error.value) == f"{repo.url}: many processes start to write at once; start one of them only"


def test_a_failure_before_the_record_leaves_none(repo: Repository) -> None:
    with failing("lease=error"), pytest.raises(OSError, match="injected"):
        acquire_lease(repo)
    assert newest_generation(repo) == 0


# --- a store without conditional puts ------------------------------------------------------------------------------


class _Careless(LocalStore):
    """A store that ignores the conditions of puts once `ignores` is set."""

    ignores = False

    def honours_conditions(self, name: str) -> bool:
        self.ignores = True
        return super().honours_conditions(name)

    def put_new(self, name: str, data: Buffer) -> None:
        (self.put if self.ignores else super().put_new)(name, data)


def test_a_lease_that_the_store_can_not_protect_is_released(tmp_path: Path) -> None:
    repo = Repository(_Careless(tmp_path))
    with pytest.raises(Refused) as error:
        acquire_lease(repo)
    one_line(error, f"{repo.url} ignores conditions of puts", "for a single job set")
    assert newest_generation(repo) == 1
    assert lease_holder(repo, 1) is None


class _TakenOver(LocalStore):
    """A directory in which another host takes the lease over before it is probed, and deletes the older record."""

    def honours_conditions(self, name: str) -> bool:
        put_lease_record(self, 2, elsewhere())
        self.delete([name])
        return super().honours_conditions(name)


def test_a_writer_that_is_taken_over_before_the_probe_is_fenced(tmp_path: Path) -> None:
    store: Store = _TakenOver(tmp_path)
    with pytest.raises(Fenced) as error:
        acquire_lease(Repository(store))
    one_line(error, "was taken over by process 4711 on elsewhere")
    assert isinstance(error.value.__cause__, NotFound)
    assert [entry.name for entry in store.list("generations")] == [generation_name(2)]
