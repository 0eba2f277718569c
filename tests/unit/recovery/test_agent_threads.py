"""The threads of an agent continue after an error that may be temporary: without them, the host would count as lost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import until

from ckpt.recovery.agent.agent_heartbeat import AgentHeartbeat
from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.run_log.agent_reports import REPORT_SECONDS, AgentReport
from ckpt.recovery.run_log.sqlite import SqliteRunLog

ERRORS = [MemoryError(), OSError(24, "Too many open files"), RuntimeError("can't start new thread")]


class _FailingRunLog(SqliteRunLog):
    """Reports are stored, unless `error` is set."""

    error: Exception | None = None
    calls = 0

    def publish_report(self, name: str, facts: Mapping[str, Any], replaces: str = "") -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        super().publish_report(name, facts, replaces)


class _FailingGuard(OrphanGuard):
    """Sends heartbeats, unless `error` is set."""

    error: Exception | None = None
    calls = 0

    def send_heartbeat(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        super().send_heartbeat()


@pytest.fixture(name="guard")
def fixture_guard(tmp_path: Path) -> Any:
    with closing(_FailingGuard("CKPT_TEST_GUARD=1", tmp_path / "pages")) as guard:
        yield guard


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_the_report_is_published_again(tmp_path: Path, guard: _FailingGuard, error: Exception) -> None:
    with closing(_FailingRunLog(tmp_path)) as run_log, closing(HostLease(run_log, guard, "a", 1)) as lease:
        report = AgentReport(
            name="a", incarnation="i", joined=time.time(), pid=1, pages="", logs="", address="127.0.0.1", port=1
        )
        with closing(AgentHeartbeat(run_log, report, lease)):
            run_log.error = error
            calls = run_log.calls
            until(lambda: run_log.calls >= calls + 2, "the report is tried again")
            run_log.error = None
            beat = run_log.reports()["a"]["beat"]
            until(lambda: run_log.reports()["a"]["beat"] > beat, f"it is published every {REPORT_SECONDS} s")


@pytest.mark.parametrize("error", ERRORS)
def test_the_contact_is_checked_again(tmp_path: Path, guard: _FailingGuard, error: Exception) -> None:
    with closing(_FailingRunLog(tmp_path)) as run_log, closing(HostLease(run_log, guard, "a", 1)):
        guard.error = error
        calls = guard.calls
        until(lambda: guard.calls >= calls + 2, "the orphan guard gets heartbeats")
