"""`TimeAccounting`, which writes the goodput ledger of a run while this agent leads it."""

from __future__ import annotations

import logging
import time
from itertools import takewhile
from pathlib import Path

from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.goodput.ledger import (
    LEDGER_FILE,
    GoodputLedger,
    LedgerSpan,
    ledger_file_name,
    process_start_time,
    read_ledger_file,
)
from ckpt.recovery.goodput.time_category import TimeCategory
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS, AgentReport
from ckpt.recovery.run_log.entry_facts import LeadFacts, facts_of
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.fd_io import describe_os_error

log = logging.getLogger("ckpt.run")


class TimeAccounting:
    """The time accounting of one agent. It accounts from when the agent leads until it reads that another agent leads.

    Each period of time begins where the one before it ended. The main thread owns this object and its ledger.

    folder: the folder of the ledger files.
    name: the name of this host.
    single_host: whether the run has no other host.
    log: the run log, for the time at which an earlier leader ended.
    coordinator: knows the reports of the other agents.
    """

    def __init__(self, folder: Path, name: str, single_host: bool, log: FollowedLog, coordinator: Coordinator) -> None:
        self._folder, self._name, self._single_host, self._log, self._coordinator = folder, name, single_host, log, coordinator
        self._ledger: GoodputLedger | None = None

    def account_start(self, run_state: RunState) -> None:
        """Account the time from the start of this process, which has begun the run, to now.

        No other agent knows this time, if one leads already. The accounting of a run on a single host does this by itself.
        """
        if not self._single_host:
            run_entry = next(entry for entry in reversed(self._log.entries) if entry.kind == "run")
            began = min(process_start_time(), time.monotonic() - (time.time() - run_entry.at))
            self._ledger = GoodputLedger(self._folder / ledger_file_name(self._name), began)
            self._ledger.account("wait", max(0, run_state.attempt))

    def account_by_reports(self, run_state: RunState, own_report: AgentReport) -> None:
        """Account the time since the last call, by the reports of the agents."""
        if not self._is_leading(run_state):
            return
        last, spec = run_state.last, run_state.spec
        assert last is not None
        assert spec is not None
        if last.kind not in ("start", "stop"):
            for_hosts = spec.hosts > 1 or run_state.wait_seconds > 0
            self.account(run_state, "wait" if for_hosts else "spawn" if last.kind == "run" else "decide")
            return
        living = self._coordinator.reports()
        attempt_reports = [report for report in living.values() if report.attempt == run_state.attempt]
        first = living.get(run_state.attempt_hosts[0].name, own_report)
        step = min((r.step for r in attempt_reports), default=-1)
        committed = max((r.committed for r in attempt_reports), default=-1)
        # After a failure the coordinator may wait for newer reports of other hosts, before it names the cause.
        is_detecting = last.kind == "start" and any(report.wrong is not None for report in attempt_reports)
        category: TimeCategory = "detect" if is_detecting else first.spent if first in attempt_reports else "spawn"
        self.account(run_state, category, step, committed)
        delays = [report.wrong.silent_seconds for report in attempt_reports if report.wrong is not None]
        silent = [self._coordinator.silent_seconds(host.name) for host in run_state.attempt_hosts]
        delays += [seconds for seconds in silent if seconds > LOST_SECONDS]
        if delays and self._ledger is not None:
            self._ledger.relabel("detect", max(delays))

    def account(self, run_state: RunState, category: TimeCategory, step: int = -1, committed: int = -1) -> None:
        """Account the time since the last call to a category."""
        if not self._is_leading(run_state):
            return
        if self._ledger is None:
            self._ledger = GoodputLedger(
                self._folder / (LEDGER_FILE if self._single_host else ledger_file_name(self._name)), self._start_time()
            )
        self._ledger.account(category, max(0, run_state.attempt), step, committed)

    def close(self, run_state: RunState) -> None:
        """Account the time until now if this agent leads, and close the ledger, because the agent ends."""
        if self._is_leading(run_state):
            self._close(ended=True)

    def _is_leading(self, run_state: RunState) -> bool:
        if run_state.leader == self._name:
            return True
        self._close(ended=False)
        return False

    def _close(self, ended: bool) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close(ended)

    def _start_time(self) -> float | None:
        """Return when this ledger begins, by CLOCK_MONOTONIC; None: with this process, which has begun the run."""
        if self._single_host:
            return None
        leads = [
            entry for entry in takewhile(lambda entry: entry.kind != "run", reversed(self._log.entries)) if entry.kind == "lead"
        ]
        leaders = [facts_of(entry, LeadFacts).name for entry in leads]
        ledgers = {name: _read_spans(self._folder / ledger_file_name(name)) for name in set(leaders)}
        ends = {name: lines[-1].at for name, lines in ledgers.items() if lines and lines[-1].at >= leads[-1].at}
        now = time.monotonic()
        is_folder_shared = bool(ends.keys() - {self._name})  # the folder also has ledgers of other hosts
        has_led_before = ends.get(self._name, 0.0) >= leads[0].at  # this agent was started again
        if is_folder_shared or has_led_before:
            return min(now, now - (time.time() - max(ends.values())))
        return now - self._coordinator.silent_seconds(leaders[1]) if len(leads) > 1 else None


def _read_spans(path: Path) -> list[LedgerSpan]:
    """Return the spans of the ledger file of an earlier leader; none if it does not exist or can't be read."""
    try:
        return read_ledger_file(path)
    except OSError as error:
        log.warning(
            "%s can't be read: %s; the ledger of this host begins with the last report of the earlier leader",
            path.name, describe_os_error(error),
        )  # fmt: skip
        return []
