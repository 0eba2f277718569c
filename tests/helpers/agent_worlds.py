"""Agents without processes or clocks: a simulated run whose agents fail at random until its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import (
    AgentReport,
)
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState

CAUSES = ["exit", "signal", "hang", "stopped"]


def agent(name: str, joined: float = 0.0, **more: object) -> AgentReport:
    """Return the report of an idle agent of this name; `more` sets other fields."""
    return AgentReport(name, f"{name}-1", joined, 1, "/p", "/l", name, 1, **more)  # type: ignore[arg-type]


@dataclass
class World:
    """Agents that follow the run log, and a run log that accepts an entry only after the last one."""

    spec: RunSpec
    agents: dict[str, AgentReport]
    log: list[LogEntry] = field(default_factory=list)
    clock: float = 0.0
    at: float = 0.0
    step: int = 0
    run_state: RunState = field(default_factory=RunState)

    def __post_init__(self) -> None:
        self.append(0, [entry_drafts.draft_run(0, "r", self.spec), Draft(0, "lead", "", {"name": min(self.agents)})])

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        """Append entries after entry number `after`, and return whether the log accepted them."""
        if after != len(self.log) or not drafts:
            return False
        self.log += [LogEntry(after + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
        before = self.run_state.last
        self.run_state = self.run_state.apply_entries(self.log[after:])
        if self.run_state.last is not before:
            self.at = self.clock
        return True

    def view(self) -> DecisionInput:
        """Return what a leader knows when it decides."""
        return DecisionInput(self.run_state, self.agents, self.agents, self.clock - self.at, self.clock - self.at)

    def follow(self) -> None:
        """Make every agent do what the newest entries require."""
        run_state, last = self.run_state, self.run_state.last
        assert last is not None
        for name, report in self.agents.items():
            is_member = any((m.name, m.incarnation) == (name, report.incarnation) for m in run_state.attempt_hosts)
            if last.kind in ("start", "stop") and is_member:
                if report.attempt != run_state.attempt:
                    assert report.doing == "idle", "the ranks of the previous attempt have ended"
                    report = replace(report, attempt=run_state.attempt, doing="running", wrong=None, uses_ckpt=True)
                if last.kind == "stop" and report.wrong is None:
                    report = replace(report, doing="over")
            elif report.doing != "idle":
                report = replace(report, doing="idle", wrong=None)
            self.agents[name] = replace(report, step=self.step, newest=self.step, committed=self.step // 5 * 5)

    def advance(self) -> None:
        """Append the next entries of the leader, and make the agents follow them."""
        self.append(len(self.log), draft_next_entries(self.view()))
        self.follow()

    def starts(self) -> list[LogEntry]:
        """Return the entries that start an attempt."""
        return [e for e in self.log if e.kind == "start"]


def world(hosts: int = 3, least: int = 3, agents: int = 3, **more: float) -> World:
    """Return a run of two ranks a host with this number of agents; `more` sets other fields of its spec."""
    spec = RunSpec(("train",), 2, hosts, least, **more)  # type: ignore[arg-type]
    return World(spec, {name: agent(name, i) for i, name in enumerate("abcdefgh"[:agents])})


def failure(host: str, committed: int = 4, cause: str = "exit", step: int = 5, restored: int | None = None) -> Failure:
    """Return a failure of a host; by default it happens soon after the committed step was restored."""
    went_on = committed if restored is None else restored
    return Failure(cause, (1,), "exited", step, committed, 10.0, host, restored=went_on)  # type: ignore[arg-type]
