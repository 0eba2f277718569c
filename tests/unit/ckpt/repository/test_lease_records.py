"""The records of writer leases: which generation is the newest, who has it, and which records are obsolete."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.failing_store import FailingStore
from helpers.folders import fast_folder
from helpers.lease_writers import elsewhere, put_lease_record
from helpers.messages import one_line

from ckpt.format import json_records
from ckpt.repository.lease_records import (
    EndMarker,
    end_markers,
    generation_name,
    lease_holder,
    list_lease_records,
    newest_generation,
    obsolete_lease_records,
)
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import IntegrityError, StoreError
from ckpt.storage.local.directory import LocalStore


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Yield a repository without any record."""
    with fast_folder(tmp_path) as folder:
        yield Repository(LocalStore(folder / "run"))


def test_names_of_generations_have_eight_digits_or_more() -> None:
    assert generation_name(7) == "generations/00000007.json"
    assert generation_name(123_456_789) == "generations/123456789.json"


def test_the_newest_generation_has_the_highest_number(repo: Repository) -> None:
    assert newest_generation(repo) == 0
    for generation in (9, 100_000_000, 10):
        put_lease_record(repo.store, generation)
    repo.store.put("generations/notes.json", b"of somebody")
    repo.store.put("steps/200000000/commit.json", b"a step is not a generation")
    assert newest_generation(repo) == 100_000_000


def test_an_end_marker_is_no_generation(repo: Repository) -> None:
    put_lease_record(repo.store, 3)
    repo.store.put(EndMarker(4, 0, 1).name, b"")
    repo.store.put("steps/5/commit.json", b"no record of a lease")
    assert newest_generation(repo) == 3
    assert sorted(list_lease_records(repo)) == ["generations/00000003.json", "generations/00000004-left-0-1.json"]


def test_end_markers_are_found_by_their_names() -> None:
    markers = [EndMarker(3, 0, 1), EndMarker(123_456_789, 12, 4000)]
    assert [marker.name for marker in markers] == [
        "generations/00000003-left-0-1.json",
        "generations/123456789-left-12-4000.json",
    ]
    others = ["generations/00000003.json", "steps/generations/00000003-left-0-1.json", "generations/00000003-left-0-1.json.old"]
    others.append("generations/00000003-left-0-1xjson")
    assert end_markers([others[0], markers[0].name, *others[1:], markers[1].name]) == markers


def test_records_of_all_generations_but_the_newest_are_obsolete(repo: Repository) -> None:
    assert obsolete_lease_records(repo) == []
    for generation in (1, 2, 5):
        put_lease_record(repo.store, generation)
        repo.store.put(EndMarker(generation, 0, 1).name, b"")
    assert sorted(obsolete_lease_records(repo)) == [
        "generations/00000001-left-0-1.json",
        "generations/00000001.json",
        "generations/00000002-left-0-1.json",
        "generations/00000002.json",
    ]


def test_an_end_marker_without_a_generation_is_not_obsolete(repo: Repository) -> None:
    repo.store.put(EndMarker(1, 0, 1).name, b"")
    assert obsolete_lease_records(repo) == []


def test_the_holder_is_the_owner_in_the_record(repo: Repository) -> None:
    owner = elsewhere()
    put_lease_record(repo.store, 3, owner)
    put_lease_record(repo.store, 4)
    assert lease_holder(repo, 3) == owner
    assert lease_holder(repo, 4) is None


def test_a_missing_record_has_no_holder_and_no_warning(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    assert lease_holder(repo, 3) is None
    assert caplog.text == ""


@pytest.mark.parametrize("damage", ["bytes", "no owner", "no host", "other kind"])
def test_the_holder_in_a_damaged_record_is_unknown(repo: Repository, damage: str) -> None:
    owner = dataclasses.asdict(elsewhere())
    del owner["host"]
    data = {
        "bytes": b"{}",
        "no owner": json_records.encode("generation", {}),
        "no host": json_records.encode("generation", {"owner": owner}),
        "other kind": json_records.encode("left", {"owner": None}),
    }[damage]
    repo.store.put(generation_name(3), data)
    with pytest.raises(IntegrityError) as error:
        lease_holder(repo, 3)
    one_line(error, f"{repo.url}/generations/00000003.json is ")


def test_a_record_that_the_store_does_not_return_is_an_error(repo: Repository) -> None:
    put_lease_record(repo.store, 3, elsewhere())
    failing = Repository(FailingStore(repo.store, "get", 1))
    with pytest.raises(StoreError, match="injected"):
        lease_holder(failing, 3)
    assert lease_holder(failing, 3) is not None
