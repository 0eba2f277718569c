"""`Coordinator`, which appends the next entries of the run log. Each agent has one, and one of them leads.

The agent that joined first leads. When it is lost, the next one takes the lead, and appends an entry that names it. An
earlier leader that is still alive reads this entry: its own appends fail, because their position is taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.run_log.agent_name import name_lost_error
from ckpt.recovery.run_log.agent_reports import AgentLiveness, AgentReport, decode_reports, pause_seconds
from ckpt.recovery.run_log.base import RunLog
from ckpt.recovery.run_log.entry_drafts import draft_lead
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.failpoints import failpoint

_LEADER_READ_SECONDS = 0.1
"""How often the leader reads the reports of the agents."""

_FOLLOWER_READ_SECONDS = 0.5
"""How often the other agents read them."""


class Coordinator:
    """The part of one agent in the decisions about a run. The main thread owns it.

    single_host: whether the run has no other host, so that no reports of others are read.
    """

    def __init__(self, run_log: RunLog, single_host: bool) -> None:
        self._run_log = run_log
        self._single_host = single_host
        self._liveness = AgentLiveness()
        self._reports_read_at = 0.0
        self._living: dict[str, AgentReport] = {}
        self._entry: tuple[str, int] | None = None
        """Kind and attempt of the last entry that was read; `_entry_at` is when it was first read."""
        self._entry_at = time.monotonic()
        self._attempt_began_at = time.monotonic()
        """When the last entry of the kind "start" was first read."""
        self._failure_seen_at: float | None = None
        self._coordinated_at = time.monotonic()

    def coordinate(self, run_state: RunState, own_report: AgentReport) -> bool:
        """Append the entries that are due now, and return whether any were.

        Raises Unavailable if the log does not answer, and CkptError if another agent has taken the name of this one.
        """
        now = time.monotonic()
        self._note_pause(now)
        self._note_entry_time(run_state, now)
        decision_input = self._decision_input(run_state, own_report, now)
        if run_state.leader != own_report.name:
            return self._try_to_lead(run_state, decision_input, own_report)
        drafts = draft_next_entries(decision_input)
        if not drafts:
            self._run_log.compact(now)
            return False
        failpoint(f"coordinator.{drafts[0].kind}")
        written = self._run_log.append(run_state.number, drafts)
        failpoint(f"coordinator.{drafts[0].kind}.written")
        return written

    def reports(self) -> dict[str, AgentReport]:
        """Return the newest reports of all living agents."""
        return self._living

    def silent_seconds(self, name: str) -> float:
        """Return the seconds since the last new report of an agent; 0 if none was observed."""
        return self._liveness.silent_seconds(name)

    def _note_pause(self, now: float) -> None:
        """Count at most UNOBSERVED_SECONDS since the last call: this process may have been stopped, and the ranks with it."""
        pause, self._coordinated_at = pause_seconds(now - self._coordinated_at), now
        self._entry_at += pause
        self._attempt_began_at += pause
        if self._failure_seen_at is not None:
            self._failure_seen_at += pause

    def _note_entry_time(self, run_state: RunState, now: float) -> None:
        """Record when the last entry was first read, by the clock of this host.

        Further entries of the same kind and attempt, such as a second stop, do not restart this time.
        """
        last = run_state.last
        entry = None if last is None else (last.kind, last.attempt)
        if entry != self._entry:
            self._entry, self._entry_at = entry, now
            if entry is not None and entry[0] == "start":
                self._attempt_began_at = now

    def _decision_input(self, run_state: RunState, own_report: AgentReport, now: float) -> DecisionInput:
        leads = run_state.leader == own_report.name
        if not self._single_host and now - self._reports_read_at >= (_LEADER_READ_SECONDS if leads else _FOLLOWER_READ_SECONDS):
            self._reports_read_at = now
            reports = decode_reports(self._run_log.reports())
            own = reports.pop(own_report.name, None)
            self._require_own_name(own, own_report)
            self._liveness.observe(reports, time.monotonic(), own)
        own_reports = {own_report.name: own_report}
        self._living = self._liveness.living() | own_reports
        maybe_living = self._liveness.maybe_living() | own_reports
        return DecisionInput(
            run_state,
            self._living,
            maybe_living,
            now - self._entry_at,
            now - self._attempt_began_at,
            self._liveness.silent(),
            self._silent_since_failure(run_state, maybe_living, now),
        )

    def _require_own_name(self, found: AgentReport | None, own_report: AgentReport) -> None:
        """Raise CkptError if another agent has taken the name of this one, as this one was silent for a while.

        found: the report of this name that the run log has.
        """
        if found is not None and found.incarnation != own_report.incarnation:
            raise name_lost_error(found.name, found.to_facts())

    def _silent_since_failure(self, run_state: RunState, maybe_living: Mapping[str, AgentReport], now: float) -> frozenset[str]:
        """Return the agents without a new report since a failure was first seen.

        Reports of the next reading may have been published before the failure, so that reading does not count.
        """
        if not any(r.wrong is not None and r.attempt == run_state.attempt for r in maybe_living.values()):
            self._failure_seen_at = None
            return frozenset()
        if self._failure_seen_at is None:
            self._failure_seen_at = now
        return self._liveness.silent_since(self._failure_seen_at + _LEADER_READ_SECONDS)

    def _try_to_lead(self, run_state: RunState, decision_input: DecisionInput, own_report: AgentReport) -> bool:
        if run_state.leader in decision_input.maybe_living or own_report.leaving:
            return False
        candidates = [report for report in decision_input.maybe_living.values() if not report.leaving]
        if min(candidates, key=lambda r: (r.joined, r.name)).name != own_report.name:
            return False
        failpoint("coordinator.lead")
        text = f"{own_report.name} leads the run from now on" + (f", as {run_state.leader} is gone" if run_state.leader else "")
        written = self._run_log.append(run_state.number, [draft_lead(max(0, run_state.attempt), text, own_report.name)])
        failpoint("coordinator.lead.written")
        return written
