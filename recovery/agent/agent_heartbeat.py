"""`AgentHeartbeat`, a thread that republishes the agent's report every 0.5 s while the main thread waits."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from dataclasses import replace

from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.agent.loop_watch import LoopWatch
from ckpt.recovery.run_log.agent_name import NameTaken
from ckpt.recovery.run_log.agent_reports import REPORT_SECONDS, AgentReport
from ckpt.recovery.run_log.base import RunLog
from ckpt.storage.base.errors import StoreError, is_transient
from ckpt.storage.base.threads import WorkerThread

log = logging.getLogger("ckpt.run")


class AgentHeartbeat:
    """Republishes the newest report until it is closed. Each acknowledged report renews the lease of this host.

    If the loop of the agent hangs, nothing is published, so that the other hosts continue without this one, and the lease ends
    the ranks. Both last until the loop ticks again.

    The main thread calls the methods. It replaces `_report` as a whole, and the thread of this object reads it without a lock.

    single_host: whether the run has no other host, so that nobody would continue without this one.
    """

    def __init__(self, run_log: RunLog, report: AgentReport, lease: HostLease, single_host: bool = False) -> None:
        self._lease = lease
        self._watch = LoopWatch(time.monotonic())
        if single_host:
            self._watch.end()
        self._is_loop_hung = False
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

    def tick(self) -> None:
        """Note that the loop of the agent runs. It calls this several times a second."""
        self._watch.tick(time.monotonic())

    def end_watch(self) -> None:
        """Publish from now on even if the loop does not tick, because the run has ended."""
        self._watch.end()

    def _run(self) -> None:
        while True:
            self._changed.wait(REPORT_SECONDS)
            self._changed.clear()
            if self._closed:
                return
            if not self._check_loop():
                self._publish()

    def _check_loop(self) -> bool:
        """Return whether the loop hangs. Then the ranks are ended."""
        seconds = self._watch.hung_seconds(time.monotonic())
        if seconds:
            if not self._is_loop_hung:
                log.error(
                    "the loop of this agent hangs in %s for %.0f s: its ranks are ended, and it sends no reports; check the "
                    "file system of --run-dir", _main_thread_place(), seconds,
                )  # fmt: skip
            self._lease.suspend(seconds)
        elif self._is_loop_hung:
            self._lease.resume()
        self._is_loop_hung = seconds > 0
        return self._is_loop_hung

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


def _main_thread_place() -> str:
    """Return the file and the line that the main thread executes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _without_progress(report: AgentReport) -> AgentReport:
    without_steps = replace(report, step=0, newest=0, committed=0, saved=0, step_seconds=0.0, spent="useful")
    return replace(without_steps, slowest=None, paces=(), warm="", memory_used_bytes=0)
