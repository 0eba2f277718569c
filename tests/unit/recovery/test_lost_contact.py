"""When a host decides that it has lost contact to the others."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.recovery.coordinator.lost_contact import PROBE_SECONDS, Contact, Probe
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS

OTHERS = frozenset("bcd")


def probe(at: float, absent: Iterable[str] = OTHERS, state: bool = False, took: float = PROBE_SECONDS) -> Probe:
    """Return a probe that ended at `at` and did not reach the hosts `absent`; `state` says whether it reached the run log."""
    return Probe(at - took, at, state, OTHERS, frozenset(absent))


def after(*probes: Probe, least: int = 1, acknowledged_at: float = 100.0) -> Contact:
    """Return the contact after these probes, with a report acknowledged at `acknowledged_at`."""
    contact = Contact(acknowledged_at, least)
    for each in probes:
        contact = contact.after_probe(each)
    return contact


def test_contact_is_lost_only_after_the_whole_lease():
    contact = after(probe(102.2), probe(102.99))
    assert not contact.is_lost(100.0 + LOST_SECONDS - 0.001)
    assert contact.is_lost(100.0 + LOST_SECONDS)


def test_two_probes_in_a_row_must_fail():
    assert not after().is_lost(103.5)
    assert not after(probe(103.2)).is_lost(103.5)
    assert after(probe(102.4), probe(103.2)).is_lost(103.5)
    assert not after(probe(102.4, state=True), probe(103.2)).is_lost(103.5)
    assert not after(probe(102.4), probe(103.2, state=True)).is_lost(103.5)


def test_a_probe_of_no_host_does_not_count():
    state_only = Probe(102.45, 103.2, is_state_reached=False)
    assert not after(state_only, state_only).is_lost(103.5)
    assert not after(probe(102.4), state_only).is_lost(103.5)


def test_contact_is_kept_when_only_the_run_log_is_out_of_reach():
    """All hosts lack it equally."""
    assert not after(probe(102.4, ""), probe(103.2, "")).is_lost(103.5)


def test_the_same_hosts_must_be_out_of_reach_in_both_probes():
    assert after(probe(102.4, "bcd"), probe(103.2, "bcd"), least=3).is_lost(103.5)
    assert not after(probe(102.4, "bcd"), probe(103.2, "bc"), least=3).is_lost(103.5)
    assert not after(probe(102.4, "b"), probe(103.2, "c")).is_lost(103.5)


def test_contact_is_lost_when_enough_hosts_to_go_on_are_out_of_reach():
    """They may be on the side of the run log."""
    assert after(probe(102.4, "cd"), probe(103.2, "cd"), least=2).is_lost(103.5)
    assert not after(probe(102.4, "d"), probe(103.2, "d"), least=2).is_lost(103.5)
    assert after(probe(102.4), probe(103.2), least=8).is_lost(103.5), "all of them, whatever the minimum is"


def test_an_acknowledged_report_renews_the_lease():
    contact = after(probe(102.4), probe(103.2)).after_acknowledgement(103.1)
    assert not contact.is_lost(103.5)
    assert not contact.is_lost(120.0)
    assert contact.after_acknowledgement(50.0) == contact, "answers may come in another order"
    assert contact.after_probe(probe(103.8)) == contact, "the probe began before that report"


def test_a_process_that_was_stopped_probes_again_first():
    stopped_between, stopped_within = probe(140.0), probe(103.2, took=30.0)
    assert not after(probe(102.4), stopped_between).is_lost(140.1)
    assert not after(probe(102.4), probe(103.2)).is_lost(140.0), "the process continues, and its probes are old"
    assert not Contact(60.0).after_probe(stopped_within).after_probe(probe(103.9)).is_lost(104.0)
    assert after(probe(102.4), stopped_between, probe(140.8)).is_lost(140.9)
