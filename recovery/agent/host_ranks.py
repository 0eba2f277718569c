"""The ranks of this host in one attempt after the other: started, watched and ended."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.recovery.agent.agent_identity import AgentIdentity
from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.agent.log_console import LogConsole
from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.ranks import launch, processes
from ckpt.recovery.ranks.fork_client import ForkServers
from ckpt.recovery.ranks.launch import LaunchSpec, RankProcess
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.ranks.rank_environment import allowed_environment
from ckpt.recovery.ranks.rank_monitor import RankMonitor
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import StartFacts, facts_of
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.failpoints import failpoint
from ckpt.training.heartbeat_page import RankHeartbeat


@dataclass(frozen=True, slots=True)
class RankSurroundings:
    """What ranks are started into. All of it outlives them."""

    pages: Path
    """Folder of their heartbeat pages."""
    select: selectors.BaseSelector
    """Returns when one of them ends."""
    orphan_guard: OrphanGuard
    console: LogConsole
    fork_servers: ForkServers | None


class HostRanks:
    """The main thread owns it; other threads may read `heartbeats`."""

    def __init__(self, spec: RunSpec, options: HostOptions, identity: AgentIdentity, around: RankSurroundings) -> None:
        self._spec, self._options, self._identity, self._around = spec, options, identity, around
        self.attempt = -1
        """That they were started for last."""
        self._port = identity.first_port
        self._monitor: RankMonitor | None = None
        self._launch_spec: LaunchSpec | None = None
        self._best_step = -1
        self._failure: HostFailure | None = None  # where there is no monitor: they did not start, or were ended

    @property
    def are_started(self) -> bool:
        """Whether they were started and not stopped since; all may have ended."""
        return self._monitor is not None

    @property
    def have_ended(self) -> bool:
        """Whether they were not stopped, and all have ended."""
        return self._monitor is not None and self._monitor.has_ended

    @property
    def failure(self) -> HostFailure | None:
        """What went wrong first with those that are started."""
        return None if self._monitor is None else self._monitor.failure

    @property
    def heartbeats(self) -> Mapping[int, RankHeartbeat]:
        """What each has said last, by number."""
        monitor = self._monitor
        return {} if monitor is None else monitor.heartbeats

    def start(self, entry: LogEntry, run_state: RunState, number: int, memory: Mapping[str, str], lease: HostLease) -> None:
        """Start those that an entry gives to this host, which is its member of this number. Raises CkptError.

        memory: the variables that say which memories they use.
        """
        member, facts = run_state.members[number], facts_of(entry, StartFacts)
        self.attempt, self._failure = entry.attempt, None
        lease.begin_attempt()
        own = {launch.AGENT_VARIABLE: self._identity.incarnation, "TORCHELASTIC_MAX_RESTARTS": str(self._spec.restarts)}
        self._launch_spec = LaunchSpec(
            run_state.run, entry.attempt, member.first, member.count, facts.ranks, number, facts.address, facts.port,
            {**allowed_environment(facts.environment), **own, **memory},
        )  # fmt: skip
        failpoint("agent.start")
        try:
            ranks = self._launch(self._launch_spec)
        except CkptError as error:
            numbers = tuple(range(member.first, member.first + member.count))
            self._failure = HostFailure("exit", numbers, f"did not start: {error}")
            raise
        for rank in ranks:
            self._around.orphan_guard.add(rank.process.pid)
            self._around.select.register(rank.pidfd, selectors.EVENT_READ, rank)
        lease.set_sessions([rank.process.pid for rank in ranks])
        best = max(self._best_step, *(failure.step for failure in run_state.failures), -1)  # a spare has seen none of it
        self._monitor = RankMonitor(ranks, self._options.limits, best, self._spec.straggler_seconds)
        self._around.console.follow(ranks)
        failpoint("agent.started")

    def _launch(self, spec: LaunchSpec) -> list[RankProcess]:
        logs = self._options.folder / "logs" / str(spec.attempt)
        around = self._around
        return launch.start(self._spec.command, spec, around.pages, logs, around.fork_servers, self._options.through_mpi)

    def poll(self, is_leaving: bool) -> None:
        """See how they are. is_leaving: this agent was asked to end."""
        if self._monitor is None:
            return
        self._monitor.is_leaving = is_leaving
        for rank in self._monitor.poll(time.monotonic()):
            self._around.select.unregister(rank.pidfd)

    def tidy(self) -> None:
        """What is done from time to time while they run."""
        processes.reap_orphans()
        self._around.orphan_guard.ensure_running()
        if self._around.fork_servers is not None and self._launch_spec is not None:
            launch.prepare_fork_server(self._around.fork_servers, self._launch_spec, self._around.pages)

    def request_stop(self, request: StopRequest) -> None:
        """Ask them to save after a step, and to end."""
        if self._monitor is not None:
            self._monitor.request_stop(request.step, request.agreed)

    def save_stacks(self) -> None:
        """Write down where they are, into their logs."""
        if self._monitor is not None:
            self._monitor.save_stacks()

    def stop(self, lease: HostLease) -> bool:
        """End them, and all that they have started; whether there were any."""
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return False
        self._best_step = max(self._best_step, monitor.newest)
        lease.set_sessions(())
        failpoint("agent.stop")
        for rank in monitor.ranks:
            with contextlib.suppress(KeyError):
                self._around.select.unregister(rank.pidfd)
        launch.stop(monitor.ranks, self._identity.mark)
        for rank in monitor.ranks:
            self._around.orphan_guard.remove(rank.process.pid)
        self._port = launch.free_port(self._options.address)
        return True

    def set_failure(self, failure: HostFailure) -> None:
        """They were stopped for this."""
        self._failure = failure

    def add_to_report(self, report: AgentReport) -> AgentReport:
        """With what they do."""
        monitor, fork_servers = self._monitor, self._around.fork_servers
        warm = "" if fork_servers is None else fork_servers.status_text
        report = replace(report, port=self._port, attempt=self.attempt, wrong=self._failure, warm=warm)
        if monitor is None:
            return report
        line, committed = monitor.newest_committed
        return replace(
            report,
            doing="over" if monitor.has_ended else "running",
            wrong=monitor.failure,
            heard=monitor.uses_ckpt,
            step=monitor.step,
            newest=monitor.newest,
            committed=committed,
            line=line,
            durable=monitor.durable,
            saved=monitor.saved,
            restored=monitor.restored,
            stop=monitor.stop_progress,
            stop_step=monitor.stop_step,
            step_seconds=monitor.step_seconds,
            spent=monitor.time_category,
            slowest=monitor.slowest_rank(time.monotonic()),
            paces=monitor.paces,
        )
