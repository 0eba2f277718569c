"""Every order of calls, lost replies and pauses of clients that change a record, in small models that are fully checked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from helpers import register_members, register_model
from helpers.campaigns import CountCases
from helpers.model_checking import explore
from helpers.processes import SOAK
from helpers.register_loss_model import DiskLossModel
from helpers.register_model import RegisterModel

from ckpt.aggregator.records.replica_set import ReplicaSet
from ckpt.storage.registers.base import DirectChange, Register, RegisterAnswer

MAX_STATES = 3_000_000


def test_a_change_whose_replies_are_lost() -> None:
    found = explore(RegisterModel(1, tries=1, lossy=True), MAX_STATES)
    found.require_correct()
    assert {"change", "spread", "prepare", "accept"} <= found.kinds


def test_a_second_change_in_two_phases() -> None:
    found = explore(RegisterModel(1, tries=2, lossy=True, value=b"9", is_direct=False), MAX_STATES)
    found.require_correct()


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: 30 to 80 s")
@pytest.mark.parametrize("value", [b"", b"9"])
def test_two_direct_changes_break_no_promise(value: bytes, count_cases: CountCases) -> None:
    found = explore(RegisterModel(2, value=value), MAX_STATES)
    count_cases(found.states)
    found.require_correct()


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: 30 to 80 s")
@pytest.mark.parametrize("options", [{}, {"is_direct": False}, {"value": b"9", "is_direct": False}])
def test_a_change_while_a_member_is_replaced_breaks_no_promise(options: dict[str, object], count_cases: CountCases) -> None:
    found = explore(RegisterModel(1, movers=1, **options), MAX_STATES)  # type: ignore[arg-type]
    count_cases(found.states)
    found.require_correct()
    assert {"accept", "scan", "unfence", "forget", "drop"} <= found.kinds


def test_a_change_while_a_member_is_replaced_without_delays_breaks_no_promise() -> None:
    found = explore(RegisterModel(1, movers=1, is_direct=False, delays=0), MAX_STATES)
    found.require_correct()
    assert {"accept", "scan", "unfence", "forget", "drop"} <= found.kinds


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: 15 to 60 s")
def test_a_change_whose_mover_is_killed_breaks_no_promise_when_another_one_completes(count_cases: CountCases) -> None:
    found = explore(RegisterModel(1, movers=2, is_killed=True, is_direct=False, delays=0), MAX_STATES)
    count_cases(found.states)
    found.require_correct()
    assert {"accept", "complete", "scan", "unfence", "forget", "drop"} <= found.kinds


@pytest.mark.parametrize("options", [{}, {"is_direct": False}, {"value": b"9"}])
def test_two_changes_while_one_of_two_members_loses_its_disk_break_no_promise(options: dict[str, object]) -> None:
    """The new disk knows neither records nor promises, and is given the values that the other member has accepted."""
    found = explore(DiskLossModel(2, **options), MAX_STATES)  # type: ignore[arg-type]
    found.require_correct()
    assert {"loss", "accept", "restore"} <= found.kinds


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: 30 to 80 s")
def test_repeated_changes_while_one_of_two_members_loses_its_disk_break_no_promise(count_cases: CountCases) -> None:
    found = explore(DiskLossModel(2, tries=1, delays=2, is_direct=False), MAX_STATES)
    count_cases(found.states)
    found.require_correct()


def test_a_lost_disk_that_votes_as_an_empty_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_members, "REGISTERS_INCOMPLETE", Register())
    assert "was acknowledged" in explore(DiskLossModel(1), MAX_STATES).error


def test_a_member_that_lists_before_it_is_fenced_loses_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the model found in the product: a member accepted a change of the old ring after it was listed."""
    monkeypatch.setattr(register_model, "LISTING", "read")
    found = explore(RegisterModel(1, movers=1), MAX_STATES)
    assert "'0' was acknowledged" in found.error
    assert any(step.startswith("scan") for step in found.steps)


def test_a_direct_change_in_spite_of_a_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def can_change(record: RegisterAnswer, change: DirectChange) -> bool:
        return isinstance(record, Register) and record.accepted_ballot == change.expected

    monkeypatch.setattr(register_members, "can_change_directly", can_change)
    assert explore(RegisterModel(2), MAX_STATES).error


def test_a_promise_that_a_lower_ballot_replaces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        register_members, "with_promise", lambda record, ballot: Register(ballot, record.accepted_ballot, record.value)
    )
    assert explore(RegisterModel(2, is_direct=False), MAX_STATES).error


def test_a_proposer_that_takes_the_oldest_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest(_: ReplicaSet, records: Mapping[str, Register]) -> Register:
        return min(records.values(), key=lambda record: record.accepted_ballot)

    monkeypatch.setattr(ReplicaSet, "newest", oldest)
    assert explore(RegisterModel(1, is_direct=False), MAX_STATES).error
