"""Which members are down, and the warnings about them."""

from __future__ import annotations

import pytest

from ckpt.aggregator.cluster import fanout
from ckpt.aggregator.cluster.fanout import MemberHealth


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def test_each_outage_is_warned_of_once_and_at_most_one_in_the_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(fanout.time, "monotonic", lambda: clock[0])
    health = MemberHealth(first_pause_seconds=0.5, max_pause_seconds=15.0)
    health.record_failure("node1", "no answer")
    assert len(warnings_of(caplog)) == 1
    for clock[0] in range(1020, 1300, 20):
        health.record_failure("node1", "no answer")
    assert warnings_of(caplog) == []
    health.record_answer("node1")
    health.record_failure("node1", "no answer")
    assert len(warnings_of(caplog)) == 1, "another outage"
    health.record_answer("node1")
    warned = 0
    for clock[0] in range(1301, 1500, 20):
        health.record_failure("node1", "no answer")
        warned += len(warnings_of(caplog))
        assert warned == (clock[0] >= 1280 + fanout.WARNING_INTERVAL_SECONDS), "an outage soon after the last warning"
