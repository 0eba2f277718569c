"""Says that an agent lives, from a thread of its own: whatever else the agent waits for, the others hear of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace

from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.run_log.agent_reports import REPORT_SECONDS, AgentReport
from ckpt.recovery.run_log.base import RunLog
from ckpt.storage.base.errors import StoreError

log = logging.getLogger("ckpt.run")


class AgentHeartbeat:
    """Repeats the newest report until it is closed. Each that the state acknowledges renews the lease of this host."""

    def __init__(self, state: RunLog, report: AgentReport, lease: HostLease) -> None:
        self._lease = lease
        self._state = state
        self._report = report
        self._beat = 0
        self._changed = threading.Event()
        self._closed = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="ckpt-voice", daemon=True)
        self._publish()  # before this agent decides anything
        self._thread.start()

    def set_report(self, report: AgentReport) -> None:
        """From now on this; at once where more has changed than where the ranks are."""
        before, self._report = self._report, report
        if _without_progress(before) != _without_progress(report):
            self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(REPORT_SECONDS)
            self._changed.clear()
            if self._closed:
                return
            self._publish()

    def _publish(self) -> None:
        self._beat += 1
        sent_at = time.monotonic()
        try:
            self._state.publish_report(self._report.name, replace(self._report, beat=self._beat).to_facts())
            self._has_failed = False
            self._lease.renew(sent_at)
            self._lease.resolve_addresses()
        except StoreError as error:
            if not self._has_failed:
                log.warning("what this agent does can't be told, and is tried again: %s", error)
            self._has_failed = True

    def close(self) -> None:
        """The agent is no more."""
        self._closed = True
        self._changed.set()
        self._thread.join()
        with contextlib.suppress(StoreError):  # then the others miss it after a while
            self._state.remove_report(self._report.name)


def _without_progress(report: AgentReport) -> AgentReport:
    where = replace(report, step=0, newest=0, committed=0, saved=0, step_seconds=0.0, spent="useful")
    return replace(where, slowest=None, paces=(), warm="", held_bytes=0)
