"""Every order of calls and pauses of clients that write and delete a file while its tombstone is collected, in small models."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import collection_model, register_members
from helpers.campaigns import CountCases
from helpers.collection_model import CollectionModel
from helpers.model_checking import explore
from helpers.processes import SOAK

from ckpt.aggregator.records.collected_tombstones import CollectionLog
from ckpt.storage.registers.base import NO_BALLOT

MAX_STATES = 6_000_000


def written_again(**options: Any) -> CollectionModel:
    """Return a model in which a client writes a file whose tombstone another client collects."""
    return CollectionModel(1, history=b"d", **options)


def continued() -> CollectionModel:
    """Return a model in which a writer was stopped in a change, which was deleted since, and continues in any era."""
    return CollectionModel(1, history=b"0d", is_stopped=True)


def test_a_file_that_is_written_while_its_tombstone_is_collected() -> None:
    found = explore(written_again(is_direct=False), MAX_STATES)
    found.require_correct()
    assert {"prepare", "accept", "fence", "confirm", "collect"} <= found.kinds


def test_a_stopped_writer_whose_file_was_deleted_and_collected() -> None:
    found = explore(continued(), MAX_STATES)
    found.require_correct()
    assert {"spread", "prepare", "accept", "collect"} <= found.kinds


def test_a_deletion_while_its_tombstone_is_collected() -> None:
    explore(CollectionModel(0, history=b"0", has_deleter=True, tries=1), MAX_STATES).require_correct()


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: 1 to 10 minutes each")
@pytest.mark.parametrize(
    "model",
    [
        CollectionModel(1, history=b"d", tries=1, late=2),
        CollectionModel(1, history=b"0d", is_stopped=True, tries=1, late=2),
        CollectionModel(2, history=b"d", is_direct=False, late=0),
        CollectionModel(1, has_deleter=True, late=0),
    ],
    ids=["direct", "stopped", "two writers", "write and delete"],
)
def test_a_collection_breaks_no_promise_in_larger_models(model: CollectionModel, count_cases: CountCases) -> None:
    found = explore(model, MAX_STATES)
    count_cases(found.states)
    found.require_correct()


# --- faults that must be found ----------------------------------------------------------------------------------


def test_a_member_that_forgets_its_ballots_without_a_floor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write gets a lower ballot than the tombstone that one member still has, and is lost."""
    monkeypatch.setattr(register_members, "with_floor_promise", lambda record, _: record)
    monkeypatch.setattr(collection_model, "floor_ballot", lambda _: NO_BALLOT)
    assert "'d0' was acknowledged" in explore(written_again(is_direct=False, round=3), MAX_STATES).error


def test_a_tombstone_that_is_collected_without_the_names_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectionLog, "may_have", lambda *_: False)
    found = explore(continued(), MAX_STATES)
    assert "return '0', but '0d' was acknowledged" in found.error, "the deleted file is back"


def test_a_register_that_is_collected_although_it_has_changed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_members, "can_collect", lambda *_: True)
    assert "'d0' was acknowledged" in explore(written_again(is_direct=False), MAX_STATES).error


def test_a_collection_that_does_not_look_again_in_the_new_era_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection_model, "is_collectable", lambda *_: True)
    assert "'d0' was acknowledged" in explore(written_again(is_direct=False), MAX_STATES).error
