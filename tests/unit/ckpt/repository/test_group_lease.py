"""The use of a writer lease by a group: its attempts, who of it has ended, and who releases the lease."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore
from helpers.forked_child import in_forked_child
from helpers.lease_writers import dead, elsewhere, living, put_lease_record
from helpers.lease_writers import local_repo as local_repo

from ckpt.errors import RanksMissing
from ckpt.format import json_records
from ckpt.groups.process_identity import this_process
from ckpt.repository.attempt import SerialCounter
from ckpt.repository.group_lease import GroupLease, acquire_group_lease, rank_0_ended_error
from ckpt.repository.lease_records import EndMarker, generation_name, lease_holder
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.local.durable_writer import temporary_name

BILLION = 10**9


@pytest.fixture
def lease(repo: Repository) -> GroupLease:
    """Return the lease of rank 0 of three."""
    return acquire_group_lease(repo, 3)


def other_rank(repo: Repository, number: int = 0) -> GroupLease:
    """Return what rank 2 of three has of the lease of generation 1. number: that of its group."""
    return GroupLease(WriterLease(repo, 1), 2, 3, number)


def records(repo: Repository) -> list[str]:
    """Return the names of the records of leases."""
    return sorted(entry.name for entry in repo.store.list("generations"))


def test_a_new_lease_belongs_to_rank_0_of_its_group(repo: Repository) -> None:
    lease = acquire_group_lease(repo, 3)
    assert (lease.rank, lease.size, lease.number, lease.progress_count) == (0, 3, 0, 0)
    assert (lease.writer.generation, lease.writer.has_shared_serials) == (1, False)
    serials = SerialCounter([repo])
    alone = acquire_group_lease(repo, serials=serials)
    assert (alone.rank, alone.size, alone.writer.has_shared_serials) == (0, 1, True)
    default = GroupLease(alone.writer)
    assert (default.rank, default.size, default.number, default.rank_processes) == (0, 1, 0, ())
    assert acquire_group_lease(repo, 3, serials).number == 1, "one number for each tier"


def test_progress_is_counted_one_by_one(lease: GroupLease) -> None:
    lease.count_progress()
    lease.count_progress()
    assert lease.progress_count == 2


# --- attempts ------------------------------------------------------------------------------------------------------


def test_attempts_of_a_group_and_of_rank_0_alone_are_counted_separately(lease: GroupLease) -> None:
    found = [lease.begin_attempt(5), lease.begin_own_attempt(5), lease.begin_attempt(5), lease.begin_own_attempt(5)]
    assert [each.number for each in found] == [0, 0, 1, 1]
    assert [each.name for each in found] == ["0-1-0", "0-1-1", "0-1-2", "0-1-3"]


def test_attempts_of_a_process_alone_are_counted_together(repo: Repository) -> None:
    alone = acquire_group_lease(repo)
    assert [alone.begin_attempt(5).number, alone.begin_own_attempt(5).number] == [0, 1]


def test_a_second_group_has_numbers_that_no_other_group_uses(lease: GroupLease) -> None:
    """The same rank may be a different process in it. Rank 0 is the same process, which counts its serials once."""
    second = lease.for_other_group(2)
    assert (second.writer, second.rank, second.size, second.number) == (lease.writer, 0, 2, 1)
    assert lease.for_other_group(2).number == 2
    first = lease.begin_attempt(5)
    assert (first.name, first.number) == ("0-1-0", 0)
    again = second.begin_attempt(5)
    assert (again.name, again.number) == ("0-1-1", BILLION)
    assert second.begin_own_attempt(5).number == BILLION


def test_other_ranks_of_a_second_group_have_serials_of_their_own(repo: Repository) -> None:
    first, second = (other_rank(repo, number).begin_attempt(5) for number in (0, 1))
    assert (first.name, first.number) == ("2-1-0", 0)
    assert (second.name, second.number) == (f"2-1-{BILLION}", BILLION)
    own = other_rank(repo, 1).begin_own_attempt(5)
    assert (own.name, own.number) == ("2-1-0", BILLION)


def test_saves_of_the_process_alone_share_the_writer_lease(lease: GroupLease) -> None:
    second = lease.for_other_group(2)
    alone = second.for_process_alone()
    assert (alone.writer, alone.rank, alone.size, alone.number) == (lease.writer, 0, 1, 2)
    assert [alone.begin_attempt(5).number, second.begin_own_attempt(5).number] == [2 * BILLION, BILLION]


def test_temporary_files_are_removed_before_a_second_group_writes(lease: GroupLease) -> None:
    path = Path(temporary_name(str(Path(lease.writer.repo.url.removeprefix("file://")) / "steps/x")))
    path.parent.mkdir()
    path.write_bytes(b"of a killed writer")
    lease.for_other_group(2)
    assert not path.exists()


# --- rank 0 --------------------------------------------------------------------------------------------------------


def test_a_rank_sees_that_rank_0_has_ended_its_saves(repo: Repository, lease: GroupLease) -> None:
    assert other_rank(repo).rank_0_error() is None
    lease.release()
    error = other_rank(repo).rank_0_error()
    assert isinstance(error, RanksMissing)
    assert str(error) == str(rank_0_ended_error(3)) == (
        "rank 0 of 3 has ended its saves, and no step can be committed any more; end rank 0 after the last save"
    )  # fmt: skip


def test_a_rank_sees_that_rank_0_is_dead(repo: Repository) -> None:
    owner = dead()
    put_lease_record(repo.store, 1, owner)
    error = other_rank(repo).rank_0_error()
    assert isinstance(error, RanksMissing)
    assert str(error) == f"rank 0 of 3 (process {owner.pid} on {owner.host}) is dead and can't commit; restart the job"
    for other in (living(), elsewhere()):
        put_lease_record(repo.store, 1, other)
        assert other_rank(repo).rank_0_error() is None


def test_rank_0_counts_as_living_where_its_record_is_missing_or_unreadable(repo: Repository) -> None:
    assert other_rank(repo).rank_0_error() is None
    for body in (b"{}", json_records.encode("generation", {}), json_records.encode("generation", {"owner": {"pid": 5}})):
        repo.store.put(generation_name(1), body)
        assert other_rank(repo).rank_0_error() is None


# --- the end of the saves ------------------------------------------------------------------------------------------


def test_the_last_group_of_a_process_releases_the_lease(lease: GroupLease) -> None:
    second = lease.for_other_group(2)
    assert lease.release() is True
    assert lease_holder(lease.writer.repo, 1) is not None
    assert second.release() is True
    assert lease_holder(lease.writer.repo, 1) is None


def test_an_abandoned_lease_is_not_released(lease: GroupLease) -> None:
    """The group that ends after it is the last one."""
    second = lease.for_other_group(2)
    lease.abandon()
    assert lease_holder(lease.writer.repo, 1) is not None
    second.release()
    assert lease_holder(lease.writer.repo, 1) is None


def test_a_release_that_the_store_refuses_returns_false(lease: GroupLease) -> None:
    lease.writer.repo.store = FailingStore(lease.writer.repo.store, "put", 1)
    assert lease.release() is False


def test_another_rank_leaves_an_end_marker_and_not_the_lease(repo: Repository, lease: GroupLease) -> None:
    assert other_rank(repo, 4).release() is True
    assert records(repo) == ["generations/00000001-left-4-2.json", generation_name(1)]
    assert json_records.load(repo.store, "left", "generations/00000001-left-4-2.json").keys() == {"kind", "format"}
    assert lease_holder(repo, 1) is not None


@pytest.mark.parametrize(("size", "left"), [(2, []), (1, ["generations/00000001-left-0-2.json"])])
def test_the_release_of_rank_0_removes_the_end_markers_of_a_group(repo: Repository, size: int, left: list[str]) -> None:
    """A process alone lists nothing."""
    lease = acquire_group_lease(repo, size)
    other_rank(repo).release()
    lease.release()
    assert records(repo) == [*left, generation_name(1)]


def test_a_rank_leaves_no_end_marker_after_rank_0(repo: Repository, lease: GroupLease) -> None:
    """Nobody would remove it."""
    lease.release()
    assert other_rank(repo).release() is True
    assert records(repo) == [generation_name(1)]


def test_an_end_marker_that_can_not_be_written_is_reported(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckpt"):
        assert other_rank(repo).release() is False
    (record,) = caplog.records
    text = f"{repo.url}: could not record that rank 2 has ended its saves: "
    assert record.getMessage().startswith(text)
    assert "generations/00000001.json" in record.getMessage().removeprefix(text)
    repo.store.put(generation_name(1), json_records.encode("generation", {}))
    assert other_rank(repo).release() is False
    assert records(repo) == [generation_name(1)]


def test_a_forked_child_of_a_rank_leaves_no_end_marker(repo: Repository, lease: GroupLease) -> None:
    other = other_rank(repo)
    assert in_forked_child(other.release) is True
    assert records(repo) == [generation_name(1)]
    other.release()
    assert len(records(repo)) == 2


def test_ranks_with_end_markers_of_this_group_have_ended(repo: Repository, lease: GroupLease) -> None:
    assert lease.ended_ranks() == set()
    for marker in (EndMarker(1, 0, 1), EndMarker(1, 1, 2), EndMarker(2, 0, 3), EndMarker(1, 0, 4)):
        repo.store.put(marker.name, b"")
    assert lease.ended_ranks() == {1, 4}


def test_ranks_whose_processes_are_dead_have_ended(lease: GroupLease) -> None:
    processes = [this_process(), dead(), elsewhere(), dead()]
    repo = lease.writer.repo
    repo.store.put(EndMarker(1, 0, 2).name, b"")
    assert GroupLease(lease.writer, 0, 4, 0, processes).ended_ranks() == {1, 2, 3}
