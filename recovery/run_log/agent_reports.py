"""What the agents of a run say of themselves, and who of them lives."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckpt.recovery.goodput.ledger import TimeCategory
from ckpt.recovery.policy.decide import PLANNED_CAUSES, Cause
from ckpt.recovery.policy.stragglers import RankPace
from ckpt.recovery.run_log.base import RunLog
from ckpt.storage.base.checked_decode import Malformed, decode
from ckpt.training.heartbeat_page import BadLoss

log = logging.getLogger("ckpt.run")

LOST_SECONDS = 3.0
"""An agent that says nothing for so long is lost."""

REPORT_SECONDS = 0.5
"""An agent says that it lives so often, at least."""


_UNOBSERVED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class HostFailure:
    """What went wrong first with the ranks of a host."""

    cause: Cause
    ranks: tuple[int, ...]
    detail: str
    silent_seconds: float = 0.0
    """How long before it was noticed."""
    bad: BadLoss | None = None
    """The loss by which it diverged."""


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """Of the ranks of a host, the one that is behind."""

    rank: int
    step: int
    silent_seconds: float
    phase: str

    def describe(self, logs: str, more: str = "") -> str:
        return f"said nothing for {self.silent_seconds:.1f} s in phase {self.phase!r} (stacks in {logs}{more})"


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One agent."""

    name: str
    incarnation: str
    """Another after it was started again."""
    joined: float
    """Seconds since 1970: who came first."""
    pid: int
    pages: str
    """Folder of the pages of its ranks."""
    logs: str
    address: str
    """Where the ranks of other hosts reach its own."""
    port: int
    """One that is free there, for rank 0."""
    attempt: int = -1
    """Of the ranks that it runs, or ran last."""
    doing: Literal["idle", "running", "over"] = "idle"
    """over: all of its ranks have ended well."""
    wrong: HostFailure | None = None
    leaving: int = 0
    """The signal by which it was asked to end."""
    hurry: bool = False
    """It was asked more than once."""
    heard: bool = False
    """Whether any of its ranks uses ckpt."""
    step: int = -1
    """The last one that all of its ranks have done."""
    newest: int = -1
    """The last one that any has done."""
    committed: int = -1
    step_seconds: float = 1.0
    """What a step takes."""
    stop: Literal["ahead", "heard", "past"] = "ahead"
    """Of the step to stop after: its ranks have not all come to hear of it; they have; one is past it and had not."""
    stop_step: int | None = None
    """Which step that is."""
    spent: TimeCategory = "spawn"
    """What its first rank spends its time on."""
    slowest: SlowestRank | None = None
    paces: tuple[RankPace, ...] = ()
    """How fast its ranks were of late; of those of which enough was seen."""
    warm: str = ""
    """Whether its next start is a warm one, in words."""
    memory: Literal["off", "coming", "ready"] = "off"
    """Whether its `fresh` node is there."""
    nodes: tuple[str, ...] = ()
    """HOST:PORT of all nodes that it serves from its memory."""
    held_bytes: int = 0
    """What steps take of the memory of its host."""
    fresh: str = ""
    """The one of them that nobody has used yet."""
    durable: int = -1
    """The newest step that is committed in another place than the memory of hosts; -1 none."""
    saved: int = -1
    """The newest step that was committed in this attempt; -1 none."""
    restored: int = -1
    """The step that this attempt went on from; -1 none."""
    line: int = 0
    """The line of training of the step that its ranks have committed last; 0 before that."""
    beat: int = 0
    """Counts what it has said."""

    def to_facts(self) -> dict[str, Any]:
        return asdict(self)


def decode_report(facts: Mapping[str, Any]) -> AgentReport:
    """From its facts. What a newer version adds is ignored. Raises Malformed."""
    found = decode(AgentReport, facts)
    if not 0 <= found.leaving < signal.NSIG or not 0 <= found.port < 1 << 16:
        raise Malformed(f"{found.leaving} is no signal, or {found.port} no port")
    if found.wrong is not None and found.wrong.cause in PLANNED_CAUSES:
        raise Malformed(f"{found.wrong.cause!r} is nothing that goes wrong")
    return found


def decode_reports(facts_by_name: Mapping[str, Mapping[str, Any]]) -> dict[str, AgentReport]:
    """The reports of all agents, by name. One that is malformed is passed over: a warning names it, once."""
    found = {}
    for name, facts in facts_by_name.items():
        try:
            found[name] = decode_report(facts)
            if found[name].name != name:
                raise Malformed(f"it is of {found.pop(name).name!r}")
        except Malformed as error:
            if name not in _warned_agents:
                _warned_agents.add(name)
                log.warning("the report of agent %s can't be read, and is passed over: %s", name, error)
    return found


_warned_agents: set[str] = set()


@dataclass(slots=True)
class _ObservedReport:
    report: AgentReport
    observed_at: float
    has_changed: bool


@dataclass(slots=True)
class AgentLiveness:
    """Who lives, as one agent sees it: by its own clock only, so that the clocks of hosts need not agree."""

    lost_seconds: float = LOST_SECONDS
    _observed: dict[str, _ObservedReport] = field(default_factory=dict)
    _now: float = 0.0

    def observe(self, reports: Mapping[str, AgentReport], now: float) -> None:
        """What all have said last. now: by CLOCK_MONOTONIC."""
        gap, self._now = now - self._now, now
        if gap > _UNOBSERVED_SECONDS:  # nobody is lost because it was this host that did not listen, or the state that was away
            for seen in self._observed.values():
                seen.observed_at += gap - _UNOBSERVED_SECONDS
        for name in self._observed.keys() - reports.keys():
            del self._observed[name]
        for name, report in reports.items():
            before = self._observed.get(name)
            if before is None or (before.report.incarnation, before.report.beat) != (report.incarnation, report.beat):
                self._observed[name] = _ObservedReport(report, now, before is not None)

    def living(self) -> dict[str, AgentReport]:
        """Those that were heard to say something new of late."""
        return {name: report for name, report in self.maybe_living().items() if self._observed[name].has_changed}

    def maybe_living(self) -> dict[str, AgentReport]:
        """Those that live, and those that may: they were not listened to for long enough."""
        return {name: seen.report for name, seen in self._observed.items() if self._now - seen.observed_at <= self.lost_seconds}

    def silent(self) -> dict[str, AgentReport]:
        """What those reported last that are neither seen to live nor known to have ended."""
        perhaps = self.maybe_living()
        return {name: seen.report for name, seen in self._observed.items() if name not in perhaps}

    def silent_since(self, since: float) -> frozenset[str]:
        """Who has said nothing since then, by CLOCK_MONOTONIC."""
        return frozenset(name for name, seen in self._observed.items() if seen.observed_at <= since)

    def silent_seconds(self, name: str) -> float:
        """Since it was heard last; 0 where it never was."""
        seen = self._observed.get(name)
        return 0.0 if seen is None else self._now - seen.observed_at


def find_living_agents(state: RunLog, seconds: float = 3 * REPORT_SECONDS) -> dict[str, AgentReport]:
    """The agents that say something new while one listens for so long, or until all that are known have."""
    liveness, until = AgentLiveness(), time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        reports = decode_reports(state.reports())
        liveness.observe(reports, now)
        if len(liveness.living()) == len(reports):
            break
        time.sleep(0.05)
    return liveness.living()
