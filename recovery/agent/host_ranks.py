"""`HostRanks`, the ranks of this host: it starts, watches and ends them in each attempt."""

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
from ckpt.recovery.ranks import launch, process_kill
from ckpt.recovery.ranks.allowed_variables import allowed_environment
from ckpt.recovery.ranks.fork_client import ForkServers
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.ranks.rank_environment import LaunchSpec
from ckpt.recovery.ranks.rank_monitor import RankMonitor
from ckpt.recovery.ranks.rank_process import RankProcess
from ckpt.recovery.ranks.stop_ranks import stop_ranks
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure, PastProgress
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import StartFacts, facts_of
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.failpoints import failpoint
from ckpt.training.heartbeat_records import RankHeartbeat


@dataclass(frozen=True, slots=True)
class RankSurroundings:
    """The parts of the agent that the ranks use. All of them outlive the ranks."""

    pages: Path
    """The folder of the heartbeat pages."""
    select: selectors.BaseSelector
    """The selector that returns when a rank ends."""
    orphan_guard: OrphanGuard
    console: LogConsole
    fork_servers: ForkServers | None


class HostRanks:
    """The ranks of this host. The main thread owns it; other threads may read `heartbeats`."""

    def __init__(self, spec: RunSpec, options: HostOptions, identity: AgentIdentity, surroundings: RankSurroundings) -> None:
        self._spec, self._options, self._identity, self._surroundings = spec, options, identity, surroundings
        self.attempt = -1
        """The attempt that the ranks were last started for."""
        self.past: PastProgress | None = None
        """The progress of the ranks of a killed agent, which the reports of this one repeat."""
        self._port = identity.first_port
        self._monitor: RankMonitor | None = None
        self._launch_spec: LaunchSpec | None = None
        self._best_step = -1
        self._failure: HostFailure | None = None  # if there is no monitor: why the ranks did not start, or were ended

    @property
    def are_started(self) -> bool:
        """Whether the ranks were started and not stopped since. All of them may have ended."""
        return self._monitor is not None

    @property
    def have_ended(self) -> bool:
        """Whether all ranks have ended without having been stopped."""
        return self._monitor is not None and self._monitor.has_ended

    @property
    def failure(self) -> HostFailure | None:
        """The first failure of the ranks that are started."""
        return None if self._monitor is None else self._monitor.failure

    @property
    def heartbeats(self) -> Mapping[int, RankHeartbeat]:
        """The last heartbeat of each rank, by its number."""
        monitor = self._monitor
        return {} if monitor is None else monitor.heartbeats

    def start(self, entry: LogEntry, run_state: RunState, number: int, memory: Mapping[str, str], lease: HostLease) -> None:
        """Start the ranks that an entry assigns to this host. Raises CkptError.

        entry: the start of the attempt.
        run_state: the state of the run after this entry.
        number: the index of this host among those of the attempt.
        memory: the environment variables that name the memory namespaces.
        lease: the lease that ends the ranks after a loss of contact.
        """
        host, facts = run_state.attempt_hosts[number], facts_of(entry, StartFacts)
        self.attempt, self._failure = entry.attempt, None
        lease.begin_attempt()
        own = {launch.AGENT_VARIABLE: self._identity.incarnation, "TORCHELASTIC_MAX_RESTARTS": str(self._spec.restarts)}
        self._launch_spec = LaunchSpec(
            run=run_state.run,
            attempt=entry.attempt,
            first_rank=host.first,
            rank_count=host.count,
            world_size=facts.ranks,
            host_index=number,
            address=facts.address,
            port=facts.port,
            extra_environment={**allowed_environment(facts.environment), **own, **memory},
        )
        failpoint("agent.start")
        try:
            ranks = self._launch(self._launch_spec)
        except CkptError as error:
            numbers = tuple(range(host.first, host.first + host.count))
            self._failure = HostFailure("exit", numbers, f"did not start: {error}")
            raise
        for rank in ranks:
            self._surroundings.orphan_guard.add(rank.process.pid)
            self._surroundings.select.register(rank.pidfd, selectors.EVENT_READ, rank)
        lease.set_sessions([rank.process.pid for rank in ranks])
        # A spare has not seen the steps of earlier attempts, so they are taken from the log, too.
        best = max(self._best_step, *(failure.step for failure in run_state.failures), -1)
        self._monitor = RankMonitor(ranks, self._options.limits, best, self._spec.straggler_seconds)
        self._surroundings.console.follow(ranks)
        failpoint("agent.started")

    def _launch(self, spec: LaunchSpec) -> list[RankProcess]:
        logs = self._options.folder / "logs" / str(spec.attempt)
        pages, fork_servers = self._surroundings.pages, self._surroundings.fork_servers
        return launch.start_ranks(self._spec.command, spec, pages, logs, fork_servers, self._options.through_mpi)

    def poll(self, is_leaving: bool) -> None:
        """Update the state of the ranks. is_leaving: whether this agent was requested to end."""
        if self._monitor is None:
            return
        self._monitor.is_leaving = is_leaving
        for rank in self._monitor.poll(time.monotonic()):
            self._surroundings.select.unregister(rank.pidfd)

    def tidy(self) -> None:
        """Do the periodic work while ranks run: reap orphans, keep the orphan guard running, prepare the fork server."""
        process_kill.reap_orphans()
        self._surroundings.orphan_guard.ensure_running()
        if self._surroundings.fork_servers is not None and self._launch_spec is not None:
            launch.prepare_fork_server(self._surroundings.fork_servers, self._launch_spec, self._surroundings.pages)

    def request_stop(self, request: StopRequest) -> None:
        """Request that the ranks save after a step and end."""
        if self._monitor is not None:
            self._monitor.request_stop(request.step, request.agreed)

    def save_stacks(self) -> None:
        """Write the stacks of all threads of the ranks next to their logs."""
        if self._monitor is not None:
            self._monitor.save_stacks()

    def stop(self, lease: HostLease) -> bool:
        """End the ranks and all processes that they have started. Return whether there were ranks."""
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return False
        self._best_step = max(self._best_step, monitor.newest)
        lease.set_sessions(())
        failpoint("agent.stop")
        for rank in monitor.ranks:
            with contextlib.suppress(KeyError):
                self._surroundings.select.unregister(rank.pidfd)
        fork_servers = self._surroundings.fork_servers
        stop_ranks(monitor.ranks, self._identity.mark, [] if fork_servers is None else fork_servers.sessions)
        for rank in monitor.ranks:
            self._surroundings.orphan_guard.remove(rank.process.pid)
        # The address may be missing while the network is down. The present port then stays, and is mostly free.
        with contextlib.suppress(CkptError):
            self._port = launch.free_port(self._options.address)
        return True

    def set_failure(self, failure: HostFailure) -> None:
        """Set the reason why the ranks were stopped."""
        self._failure = failure

    def add_to_report(self, report: AgentReport) -> AgentReport:
        """Return the report with the fields that are about the ranks."""
        monitor, fork_servers = self._monitor, self._surroundings.fork_servers
        warm = "" if fork_servers is None else fork_servers.status_text
        report = replace(report, port=self._port, attempt=self.attempt, wrong=self._failure, warm=warm, past=self.past)
        if monitor is None:
            return report
        line, committed = monitor.newest_committed
        return replace(
            report,
            doing="over" if monitor.has_ended else "running",
            wrong=monitor.failure,
            uses_ckpt=monitor.uses_ckpt,
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
