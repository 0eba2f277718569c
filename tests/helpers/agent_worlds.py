"""Agents without processes or clocks: a world in which they fail at random, driven to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt.recovery.coordinator.transitions import DecisionInput, draft_next_entries
from ckpt.recovery.policy.decide import Failure
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import (
    AgentReport,
)
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState

CAUSES = ["exit", "signal", "hang", "stopped"]


def agent(name: str, joined: float = 0.0, **more: object) -> AgentReport:
    return AgentReport(name, f"{name}-1", joined, 1, "/p", "/l", name, 1, **more)  # type: ignore[arg-type]


@dataclass
class World:
    """Agents that do what the log says, and a log that takes an entry only behind the last one."""

    spec: RunSpec
    agents: dict[str, AgentReport]
    log: list[LogEntry] = field(default_factory=list)
    clock: float = 0.0
    at: float = 0.0
    step: int = 0
    course: RunState = field(default_factory=RunState)

    def __post_init__(self) -> None:
        self.append(0, [entry_drafts.draft_run(0, "r", self.spec), Draft(0, "lead", "", {"name": min(self.agents)})])

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        if after != len(self.log) or not drafts:
            return False
        self.log += [LogEntry(after + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
        before = self.course.last
        self.course = self.course.apply_entries(self.log[after:])
        if self.course.last is not before:
            self.at = self.clock
        return True

    def view(self) -> DecisionInput:
        return DecisionInput(self.course, self.agents, self.agents, self.clock - self.at, self.clock - self.at)

    def follow(self) -> None:
        """Every agent does what the newest entries say."""
        course, last = self.course, self.course.last
        assert last is not None
        for name, said in self.agents.items():
            mine = any((m.name, m.incarnation) == (name, said.incarnation) for m in course.members)
            if last.kind in ("start", "stop") and mine:
                if said.attempt != course.attempt:
                    assert said.doing == "idle", "what was before has ended"
                    said = replace(said, attempt=course.attempt, doing="running", wrong=None, heard=True)
                if last.kind == "stop" and said.wrong is None:
                    said = replace(said, doing="over")
            elif said.doing != "idle":
                said = replace(said, doing="idle", wrong=None)
            self.agents[name] = replace(said, step=self.step, newest=self.step, committed=self.step // 5 * 5)

    def turn(self) -> None:
        self.append(len(self.log), draft_next_entries(self.view()))
        self.follow()

    def starts(self) -> list[LogEntry]:
        return [e for e in self.log if e.kind == "start"]


def world(hosts: int = 3, least: int = 3, agents: int = 3, **more: float) -> World:
    spec = RunSpec(("train",), 2, hosts, least, **more)  # type: ignore[arg-type]
    return World(spec, {name: agent(name, i) for i, name in enumerate("abcdefgh"[:agents])})


def failure(host: str, committed: int = 4, cause: str = "exit", step: int = 5, restored: int | None = None) -> Failure:
    """Soon after it went on from what is committed, where nothing else is said."""
    went_on = committed if restored is None else restored
    return Failure(cause, (1,), "exited", step, committed, 10.0, host, restored=went_on)  # type: ignore[arg-type]
