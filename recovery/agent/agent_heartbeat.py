"""`AgentHeartbeat`, a thread that republishes the agent's report every 0.5 s while the main thread waits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace

from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.run_log.agent_name import NameTaken
from ckpt.recovery.run_log.agent_reports import REPORT_SECONDS, AgentReport
from ckpt.recovery.run_log.base import RunLog
from ckpt.storage.base.errors import StoreError, is_transient
from ckpt.storage.base.threads import WorkerThread

log = logging.getLogger("ckpt.run")


class AgentHeartbeat:
    """Republishes the newest report until it is closed. Each acknowledged report renews the lease of this host."""

    def __init__(self, run_log: RunLog, report: AgentReport, lease: HostLease) -> None:
        self._lease = lease
        self._run_log = run_log
        self._report = report
        self._beat = 0
        self._changed = threading.Event()
        self._closed = False
        self._has_failed = False
        self._thread = WorkerThread(target=self._run, name="ckpt-heartbeat", daemon=True)
        self._publish()  # the first report must precede the first decision of this agent
        self._thread.start()

    def set_report(self, report: AgentReport) -> None:
        """Replace the report. It is published at once if more than the progress of the ranks has changed."""
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
            self._run_log.publish_report(self._report.name, replace(self._report, beat=self._beat).to_facts())
            self._has_failed = False
            self._lease.renew(sent_at)
            self._lease.resolve_addresses()
        except NameTaken:  # the coordinator finds the report of the other agent, and ends this one
            return
        except Exception as error:
            if not isinstance(error, StoreError) and not is_transient(error):
                raise
            if not self._has_failed:
                log.warning("the report of this agent can't be published, and is tried again: %s", error)
            self._has_failed = True

    def close(self) -> None:
        """End the thread and remove the report, because the agent ends."""
        self._closed = True
        self._changed.set()
        self._thread.join()
        with contextlib.suppress(StoreError):  # without this the agent counts as lost after LOST_SECONDS
            self._run_log.remove_report(self._report.name, self._report.incarnation)


def _without_progress(report: AgentReport) -> AgentReport:
    without_steps = replace(report, step=0, newest=0, committed=0, saved=0, step_seconds=0.0, spent="useful")
    return replace(without_steps, slowest=None, paces=(), warm="", memory_used_bytes=0)
