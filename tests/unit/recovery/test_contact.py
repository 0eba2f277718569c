"""When a host counts itself as cut off from the others."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.recovery.coordinator.lost_contact import PROBE_SECONDS, Contact, Probe
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS

OTHERS = frozenset("bcd")


def look(at: float, absent: Iterable[str] = OTHERS, state: bool = False, took: float = PROBE_SECONDS) -> Probe:
    """That ended at this time."""
    return Probe(at - took, at, state, OTHERS, frozenset(absent))


def after(*looks: Probe, least: int = 1, acknowledged_at: float = 100.0) -> Contact:
    contact = Contact(acknowledged_at, least)
    for each in looks:
        contact = contact.after_probe(each)
    return contact


def test_the_whole_lease_must_have_passed():
    contact = after(look(102.2), look(102.99))
    assert not contact.is_lost(100.0 + LOST_SECONDS - 0.001)
    assert contact.is_lost(100.0 + LOST_SECONDS)


def test_two_looks_in_a_row_must_fail():
    assert not after().is_lost(103.5)
    assert not after(look(103.2)).is_lost(103.5)
    assert after(look(102.4), look(103.2)).is_lost(103.5)
    assert not after(look(102.4, state=True), look(103.2)).is_lost(103.5)
    assert not after(look(102.4), look(103.2, state=True)).is_lost(103.5)


def test_a_look_that_asked_no_host_proves_nothing():
    asked_state_only = Probe(102.45, 103.2, is_state_reached=False)
    assert not after(asked_state_only, asked_state_only).is_lost(103.5)
    assert not after(look(102.4), asked_state_only).is_lost(103.5)


def test_the_state_alone_is_out_of_reach():
    """It is away for all alike."""
    assert not after(look(102.4, ""), look(103.2, "")).is_lost(103.5)


def test_a_host_must_be_out_of_reach_in_both_looks():
    assert after(look(102.4, "bcd"), look(103.2, "bcd"), least=3).is_lost(103.5)
    assert not after(look(102.4, "bcd"), look(103.2, "bc"), least=3).is_lost(103.5)
    assert not after(look(102.4, "b"), look(103.2, "c")).is_lost(103.5)


def test_as_many_as_can_go_on_are_out_of_reach():
    """They may be on the side of the state."""
    assert after(look(102.4, "cd"), look(103.2, "cd"), least=2).is_lost(103.5)
    assert not after(look(102.4, "d"), look(103.2, "d"), least=2).is_lost(103.5)
    assert after(look(102.4), look(103.2), least=8).is_lost(103.5), "all of them, however many are needed"


def test_an_acknowledged_report_renews_the_lease():
    contact = after(look(102.4), look(103.2)).after_acknowledgement(103.1)
    assert not contact.is_lost(103.5)
    assert not contact.is_lost(120.0)
    assert contact.after_acknowledgement(50.0) == contact, "answers may come in another order"
    assert contact.after_probe(look(103.8)) == contact, "it began before that report"


def test_a_process_that_stood_still_tries_again_first():
    stopped_between, stopped_within = look(140.0), look(103.2, took=30.0)
    assert not after(look(102.4), stopped_between).is_lost(140.1)
    assert not after(look(102.4), look(103.2)).is_lost(140.0), "it wakes, and what it knows is old"
    assert not Contact(60.0).after_probe(stopped_within).after_probe(look(103.9)).is_lost(104.0)
    assert after(look(102.4), stopped_between, look(140.8)).is_lost(140.9)
