"""Which members are down, and the warnings about them."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from ckpt.aggregator.cluster import member_health
from ckpt.aggregator.cluster.member_health import MemberHealth
from ckpt.storage.base.errors import StoreError, Unavailable


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return found


def test_each_outage_is_warned_of_once_and_at_most_one_in_the_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(member_health.time, "monotonic", lambda: clock[0])
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
        assert warned == (clock[0] >= 1280 + member_health.WARNING_INTERVAL_SECONDS), "an outage soon after the last warning"


def failed_probes(health: MemberHealth) -> int:
    """Probe a member that is down once more, and return how many of its calls have failed in a row."""
    while time.monotonic() < health._backoffs["node1"][0]:
        time.sleep(0.001)
    assert health.is_down("node1")
    for thread in threading.enumerate():
        if thread.name == "ckpt-probe":
            thread.join(600)
    until, failures = health._backoffs["node1"]
    assert until < time.monotonic() + 1.0, "the next probe begins after the pause"
    return failures


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "error", [Unavailable("no answer"), StoreError("damaged"), PermissionError(errno.EACCES, "no"), MemoryError(), ValueError()]
)
def test_each_error_of_a_probe_is_followed_by_another_probe_after_the_pause(error: Exception) -> None:
    def probe(name: str) -> None:
        raise error

    health = MemberHealth(first_pause_seconds=0.01, max_pause_seconds=0.02, probe=probe)
    health.record_failure("node1", "no answer")
    assert [failed_probes(health) for _ in range(3)] == [2, 3, 4]


def test_a_probe_that_gets_no_thread_is_tried_again_after_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    health = MemberHealth(first_pause_seconds=0.01, max_pause_seconds=0.02, probe=lambda _: None)
    health.record_failure("node1", "no answer")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert [failed_probes(health) for _ in range(3)] == [2, 3, 4]
