"""What the time of a run is spent on, as the agent that leads it sees it. Each begins where the one before it has ended."""

from __future__ import annotations

import time
from itertools import takewhile
from pathlib import Path

from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.goodput.ledger import LEDGER_FILE, GoodputLedger, TimeCategory, ledger_file_name, read_ledger_file
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS, AgentReport
from ckpt.recovery.run_log.entry_facts import LeadFacts, facts_of
from ckpt.recovery.run_log.run_state import RunState


class TimeAccounting:
    """Of one agent: it accounts from when it leads until it learns that another does.

    name: of its host. alone: there is no other. log: of the run; it grows. coordinator: has heard of the other agents.
    """

    def __init__(self, folder: Path, name: str, single_host: bool, log: FollowedLog, coordinator: Coordinator) -> None:
        self._folder, self._name, self._single_host, self._log, self._coordinator = folder, name, single_host, log, coordinator
        self._ledger: GoodputLedger | None = None

    def account_by_reports(self, run_state: RunState, own_report: AgentReport) -> None:
        """The time since the last call, by what the agents have said."""
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
        first = living.get(run_state.members[0].name, own_report)
        step, committed = (
            min((r.step for r in attempt_reports), default=-1),
            max((r.committed for r in attempt_reports), default=-1),
        )
        waits = last.kind == "start" and any(
            report.wrong is not None for report in attempt_reports
        )  # until all have been heard
        self.account(run_state, "detect" if waits else first.spent if first in attempt_reports else "spawn", step, committed)
        late = [report.wrong.silent_seconds for report in attempt_reports if report.wrong is not None]
        silent = [self._coordinator.silent_seconds(member.name) for member in run_state.members]
        late += [seconds for seconds in silent if seconds > LOST_SECONDS]
        if late and self._ledger is not None:
            self._ledger.relabel("detect", max(late))

    def account(self, run_state: RunState, name: TimeCategory, step: int = -1, committed: int = -1) -> None:
        """The time since the last call was spent on this."""
        if not self._is_leading(run_state):
            return
        if self._ledger is None:
            self._ledger = GoodputLedger(
                self._folder / (LEDGER_FILE if self._single_host else ledger_file_name(self._name)), self._start_time()
            )
        self._ledger.account(name, max(0, run_state.attempt), step, committed)

    def close(self, run_state: RunState) -> None:
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
        """By CLOCK_MONOTONIC; None: with this process, which has begun the run."""
        if self._single_host:
            return None
        leads = [
            entry for entry in takewhile(lambda entry: entry.kind != "run", reversed(self._log.entries)) if entry.kind == "lead"
        ]
        leaders = [facts_of(entry, LeadFacts).name for entry in leads]
        ledgers = {name: read_ledger_file(self._folder / ledger_file_name(name)) for name in set(leaders)}
        until = {name: lines[-1].at for name, lines in ledgers.items() if lines and lines[-1].at >= leads[-1].at}
        now = time.monotonic()
        shared = bool(until.keys() - {self._name})  # by the hosts: their ledgers are here, too
        if shared or until.get(self._name, 0.0) >= leads[0].at:  # this agent, started again
            return min(now, now - (time.time() - max(until.values())))
        return now - self._coordinator.silent_seconds(leaders[1]) if len(leads) > 1 else None
