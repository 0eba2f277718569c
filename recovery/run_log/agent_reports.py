"""The report that each agent publishes, as a record, and which agents are alive by their reports."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from ckpt.recovery.goodput.time_category import TimeCategory
from ckpt.recovery.policy.failure import PLANNED_CAUSES, Cause
from ckpt.recovery.policy.stragglers import RankPace
from ckpt.recovery.run_log.base import RunLog
from ckpt.storage.base.checked_decode import Malformed, decode
from ckpt.storage.node.client_credentials import MAX_PORT
from ckpt.training.heartbeat_records import BadLoss

log = logging.getLogger("ckpt.run")

LOST_SECONDS = 3.0
"""An agent without a new report for this long is lost."""

REPORT_SECONDS = 0.5
"""The longest time between two reports of an agent."""

UNOBSERVED_SECONDS = 1.0
"""The longest part of a gap between two observations that counts as silence of agents or ranks. In a longer gap, the observer
was stopped."""


@dataclass(frozen=True, slots=True)
class HostFailure:
    """The first failure of the ranks of a host."""

    cause: Cause
    ranks: tuple[int, ...]
    detail: str
    silent_seconds: float = 0.0
    """How long before its detection it happened."""
    bad: BadLoss | None = None
    """The bad loss, if the cause is "diverged"."""


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank of a host that is behind the others."""

    rank: int
    step: int
    silent_seconds: float
    phase: str

    def describe(self, logs: str, more: str = "") -> str:
        """Return a text about the silence of this rank. logs: the folder with its stacks. more: a text to append."""
        return f"sent no heartbeat for {self.silent_seconds:.1f} s in phase {self.phase!r} (stacks in {logs}{more})"


@dataclass(frozen=True, slots=True)
class PastProgress:
    """What a killed agent has reported about its ranks. Its successor repeats it, as the leader may not have read it."""

    attempt: int
    committed: int
    line: int
    restored: int
    durable: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class AgentReport:
    """The report of one agent: its identity, what its ranks do, and what it serves."""

    name: str
    incarnation: str
    """A random name of this process of the agent. It differs after the agent has been started again."""
    joined: float
    """When the agent joined the run, in seconds since 1970. The first one leads."""
    pid: int
    pages: str
    """The folder of the heartbeat pages of its ranks."""
    logs: str
    """The folder of the logs of its ranks."""
    address: str
    """The address at which ranks of other hosts reach its ranks."""
    port: int
    """A free port at that address, for rank 0."""
    attempt: int = -1
    """The attempt of the ranks that it runs, or ran last."""
    doing: Literal["idle", "running", "over"] = "idle"
    """over: all of its ranks have ended with success."""
    wrong: HostFailure | None = None
    leaving: int = 0
    """The signal by which the agent was requested to end; 0 none."""
    hurry: bool = False
    """Whether it was requested to end more than once."""
    uses_ckpt: bool = False
    """Whether any of its ranks uses ckpt."""
    step: int = -1
    """The last step that all of its ranks have done."""
    newest: int = -1
    """The last step that any of its ranks has done."""
    committed: int = -1
    """The newest committed step; -1 none."""
    step_seconds: float = 1.0
    """The duration of one step."""
    stop: Literal["ahead", "acknowledged", "past"] = "ahead"
    """About the stop step. ahead: not all of its ranks have acknowledged it. acknowledged: all have. past: one passed it before
    it acknowledged it."""
    stop_step: int | None = None
    """The step that `stop` is about."""
    spent: TimeCategory = "spawn"
    """What its first rank spends its time on."""
    slowest: SlowestRank | None = None
    paces: tuple[RankPace, ...] = ()
    """The recent pace of those of its ranks of which enough steps were observed."""
    warm: str = ""
    """Text: whether its next start is a warm start."""
    memory: Literal["off", "coming", "ready"] = "off"
    """Whether its `fresh` node is ready."""
    nodes: tuple[str, ...] = ()
    """HOST:PORT of all nodes that it serves from its memory."""
    memory_used_bytes: int = 0
    """The bytes of the memory of its host that saved steps take."""
    fresh: str = ""
    """The one of `nodes` that no attempt has used yet."""
    durable: int = -1
    """The newest step that is committed outside of the memory of hosts; -1 none."""
    saved: int = -1
    """The newest step that was committed in this attempt; -1 none."""
    restored: int = -1
    """The step that this attempt resumed from; -1 none."""
    line: int = 0
    """The training line of the step that its ranks have committed last; 0 before that."""
    beat: int = 0
    """The number of this report."""
    past: PastProgress | None = None
    """The progress of the ranks of a killed agent of this name, in the attempt in which this one has joined."""

    def progress_in(self, attempt: int) -> PastProgress | None:
        """Return the progress of the ranks of this host in an attempt, as far as it is known; None: nothing is known."""
        if self.attempt == attempt:
            return PastProgress(attempt, self.committed, self.line, self.restored, self.durable, self.step_seconds)
        return self.past if self.past is not None and self.past.attempt == attempt else None

    def to_facts(self) -> dict[str, object]:
        """Return the report as JSON values, as `decode_report` reads it."""
        return asdict(self)


def decode_report(facts: Mapping[str, object]) -> AgentReport:
    """Return the report in these facts. Fields that a newer version adds are ignored. Raises Malformed."""
    report = decode(AgentReport, facts)
    if not 0 <= report.leaving < signal.NSIG or not 0 <= report.port <= MAX_PORT:
        raise Malformed(f"{report.leaving} is not a signal, or {report.port} is not a port")
    if report.wrong is not None and report.wrong.cause in PLANNED_CAUSES:
        raise Malformed(f"{report.wrong.cause!r} is not a failure")
    return report


def decode_reports(facts_by_name: Mapping[str, Mapping[str, object]]) -> dict[str, AgentReport]:
    """Return the reports of all agents, by name. A malformed one is left out, and one warning names its agent."""
    found = {}
    for name, facts in facts_by_name.items():
        try:
            found[name] = decode_report(facts)
            if found[name].name != name:
                raise Malformed(f"it is of {found.pop(name).name!r}")
        except Malformed as error:
            if name not in _warned_agents:
                _warned_agents.add(name)
                log.warning(
                    "the report of agent %s can't be read, and is skipped (%s); install the same version of ckpt-store "
                    "on all hosts", name, error,
                )  # fmt: skip
    return found


_warned_agents: set[str] = set()
"""The agents whose report a warning has named already."""


@dataclass(slots=True)
class _ObservedReport:
    report: AgentReport
    observed_at: float
    has_changed: bool


def pause_seconds(gap: float) -> float:
    """Return the part of a gap between two observations that does not count as silence, because this host was stopped."""
    return max(0.0, gap - UNOBSERVED_SECONDS)


@dataclass(slots=True)
class AgentLiveness:
    """Which agents are alive, as one agent observes it. It uses its own clock only, so the clocks of hosts may differ.

    The main thread owns it.
    """

    lost_seconds: float = LOST_SECONDS
    _observed: dict[str, _ObservedReport] = field(default_factory=dict)
    _now: float = 0.0
    _own_beat: tuple[str, int] | None = None
    _own_changed_at: float = 0.0

    def observe(self, reports: Mapping[str, AgentReport], now: float, own: AgentReport | None = None) -> None:
        """Record the newest reports of the other agents.

        now: the time by CLOCK_MONOTONIC.
        own: the report of this agent, as the run log has it. While it is not replaced, the log accepts no report of any agent,
            for example because etcd is full, so the silence of the others does not count.
        """
        gap, self._now = now - self._now, now
        pause = gap if self._is_unwritable(own) else pause_seconds(gap)
        for seen in self._observed.values():  # no agent is lost because this host read no reports, or the log was unavailable
            seen.observed_at += pause
        for name in self._observed.keys() - reports.keys():
            del self._observed[name]
        for name, report in reports.items():
            before = self._observed.get(name)
            if before is None or (before.report.incarnation, before.report.beat) != (report.incarnation, report.beat):
                self._observed[name] = _ObservedReport(report, now, before is not None)

    def _is_unwritable(self, own: AgentReport | None) -> bool:
        """Return whether the report of this agent is older than it should be."""
        if own is None:
            return False
        if (beat := (own.incarnation, own.beat)) != self._own_beat:
            self._own_beat, self._own_changed_at = beat, self._now
        return self._now - self._own_changed_at > UNOBSERVED_SECONDS

    def living(self) -> dict[str, AgentReport]:
        """Return the reports of agents that were observed to publish a new report recently."""
        return {name: report for name, report in self.maybe_living().items() if self._observed[name].has_changed}

    def maybe_living(self) -> dict[str, AgentReport]:
        """Return the reports of living agents, and of those that were observed too briefly to know."""
        return {name: seen.report for name, seen in self._observed.items() if self._now - seen.observed_at <= self.lost_seconds}

    def silent(self) -> dict[str, AgentReport]:
        """Return the last reports of lost agents: no new one came for `lost_seconds`, and the old one is still there."""
        maybe_living = self.maybe_living()
        return {name: seen.report for name, seen in self._observed.items() if name not in maybe_living}

    def silent_since(self, since: float) -> frozenset[str]:
        """Return the agents without a new report since this time by CLOCK_MONOTONIC."""
        return frozenset(name for name, seen in self._observed.items() if seen.observed_at <= since)

    def silent_seconds(self, name: str) -> float:
        """Return the seconds since the last new report of an agent; 0 if none was observed."""
        seen = self._observed.get(name)
        return 0.0 if seen is None else self._now - seen.observed_at


def find_living_agents(run_log: RunLog, seconds: float = 3 * REPORT_SECONDS) -> dict[str, AgentReport]:
    """Return the agents that publish a new report within `seconds`. Returns early when all agents have."""
    liveness, until = AgentLiveness(), time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        reports = decode_reports(run_log.reports())
        liveness.observe(reports, now)
        if len(liveness.living()) == len(reports):
            break
        time.sleep(0.05)
    return liveness.living()
