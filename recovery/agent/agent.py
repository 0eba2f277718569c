"""One host's part of a run: it starts the ranks that the log gives it, looks after them, ends them when the log says so, and
says what they do. It leads the run where it comes to that (coordinator.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.recovery.agent import metrics
from ckpt.recovery.agent.heartbeat import AgentHeartbeat
from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.agent.log_console import LogConsole
from ckpt.recovery.agent.time_accounting import TimeAccounting
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.goodput.ledger import TimeCategory, total_seconds_by_category
from ckpt.recovery.memory_tier import local
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes, NodeSecurity, nodes_with_objects
from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.policy.decide import describe_failure
from ckpt.recovery.policy.hang_limits import HangLimits
from ckpt.recovery.ranks import launch, processes
from ckpt.recovery.ranks.fork_client import ForkServers
from ckpt.recovery.ranks.launch import LaunchSpec
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.ranks.rank_environment import allowed_environment
from ckpt.recovery.ranks.rank_monitor import RankMonitor
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import (
    LOST_SECONDS,
    REPORT_SECONDS,
    AgentReport,
    HostFailure,
    decode_reports,
    find_living_agents,
)
from ckpt.recovery.run_log.base import LogEntry, RunLog
from ckpt.recovery.run_log.entry_drafts import draft_end, draft_lead, draft_memory, draft_note, draft_run
from ckpt.recovery.run_log.entry_facts import EndFacts, RunFacts, StartFacts, facts_of, memories_of
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import CkptError, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.http_pages import HttpPages
from ckpt.storage.base.plural import format_count
from ckpt.tiers import tier_spec

log = logging.getLogger("ckpt.run")

_TICK_SECONDS = 0.05
_TIDY_SECONDS = 0.5
_JOIN_SECONDS = 10.0
"""A state that does not answer for so long at the beginning is no pause: the URL is wrong, or it is not there."""
_READ_SECONDS = 0.1
"""How often the log is read, where others write it."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """What is this host's own."""

    name: str
    folder: Path
    """Its lock, its ledger, the logs."""
    address: str = "127.0.0.1"
    """Where the ranks of other hosts reach its own."""
    limits: HangLimits = field(default_factory=HangLimits)
    shown_output: str = "0"
    """Whose output goes to the console: "0", "all" or "none"."""
    use_fork_server: bool = True
    """Ranks are forked from a process that has imported what they import, where that can be."""
    metrics: tuple[str, int] | None = None
    """Where /metrics is served."""
    through_mpi: bool = False
    """mpiexec starts the ranks, for programs that use MPI's own world."""
    begin_anew: bool = False
    """Begin anew where a run of several hosts has come to its end."""
    security: NodeSecurity | None = None
    """Of the nodes in the memory of this host, where there are several hosts; None: there are none."""


class Agent:
    """The agent of this host, from the main thread."""

    def __init__(self, spec: RunSpec, options: HostOptions, state: RunLog, print_line: Callable[[str], None]) -> None:
        self._spec = spec
        self._options = options
        self._state = state
        self._print_line = print_line
        self._incarnation = secrets.token_hex(8)
        self._mark = f"{launch.AGENT_VARIABLE}={self._incarnation}"
        self._run_id = ""
        self._joined_at = time.time()
        self._port = launch.free_port(options.address)
        self._run_state = RunState()
        self._log: list[LogEntry] = []
        self._monitor: RankMonitor | None = None
        self._time_accounting: TimeAccounting | None = None
        self._fork_servers = ForkServers(spec.command) if options.use_fork_server and not options.through_mpi else None
        self._memory_folder = local.memory_folder(options.folder) if spec.hosts == 1 else None
        self._memory_used_bytes = 0
        self._memory_nodes: MemoryNodes | None = None
        self._unlisted: frozenset[str] = frozenset()
        self._attempt = -1
        self._best_step = -1
        self._failure: HostFailure | None = None  # of ranks that could not be started
        self._signals = Signals()
        self._read_at = self._tidy_at = 0.0
        self._status: int | None = None
        self._state_error = self._pending_text = ""
        self._last_printed = ""
        self._printed_stop_attempt = -1
        self._is_leaving = False

    def run(self) -> int:
        """The exit status: 0 the job has ended well, 1 it was given up, 128 + n it was asked to end by signal n."""
        processes.adopt_orphans()
        with contextlib.closing(selectors.DefaultSelector()) as self._select, self._signals.installed(self._select):
            self._pages = Path(tempfile.mkdtemp(prefix="ckpt-run-", dir=_shared_memory_folder()))
            try:
                return self._run_with_pages()
            finally:
                shutil.rmtree(self._pages, ignore_errors=True)

    def _run_with_pages(self) -> int:
        self._orphan_guard = OrphanGuard(self._mark, self._pages, LOST_SECONDS if self._spec.hosts > 1 else 0.0)
        self._console = LogConsole(self._options.shown_output)
        web = None
        try:
            web = self._serve_metrics()
            self._memory_nodes = self._start_memory_nodes()
            self._join()
            self._unlisted = self._find_unlisted_nodes()
            if self._status is not None:
                return self._status
            single_host = self._spec.hosts == 1
            self._coordinator = Coordinator(self._state, single_host)
            self._time_accounting = TimeAccounting(
                self._options.folder, self._options.name, single_host, self._log, self._coordinator
            )
            with contextlib.closing(
                HostLease(self._state, self._orphan_guard, self._options.name, self._spec.least)
            ) as self._lease:
                self._heartbeat = AgentHeartbeat(self._state, self._make_report(), self._lease)
                try:
                    return self._run_until_end()
                finally:
                    self._stop_ranks()
                    if self._status is not None:
                        self._drain_memory()
                    self._heartbeat.close()
        finally:
            if self._memory_nodes is not None:
                self._memory_nodes.close(free := self._can_free_memory())
                if self._status is None and not free and memory_placement.node_addresses(self._run_state.memory):
                    self._print("the run has not ended, and the memory is kept: start ckpt-run again")
            if web is not None:
                web.close()
            if self._fork_servers is not None:
                self._fork_servers.close()
            self._console.close()
            self._orphan_guard.close()
            if self._time_accounting is not None:
                self._time_accounting.close(self._run_state)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone, a full disk: the log has it
            self._print_line(text)

    def _run_until_end(self) -> int:
        while True:
            self._poll_ranks()
            self._handle_contact_loss()
            try:
                while self._status is None and (self._follow_log() or self._coordinate()):
                    pass
                self._state_error = self._pending_text = ""
            except StoreError as error:
                self._handle_state_error(error)
            if self._status is not None:
                return self._status
            if self._signals.first and self._can_leave():
                return 128 + self._signals.first
            self._wait()

    # --- joining -----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Become part of the run under way, or begin one. Where the state does not answer, it is asked again for a while."""
        until = time.monotonic() + _JOIN_SECONDS
        while True:
            try:
                if self._try_join():
                    return
            except Unavailable:
                if self._signals.first or time.monotonic() > until:
                    raise
                time.sleep(REPORT_SECONDS)

    def _try_join(self) -> bool:
        self._read_log()
        run_state, single_host = self._run_state, self._spec.hosts == 1
        reports = self._state.reports()
        is_under_way = run_state.last is not None and not run_state.has_ended
        can_join = is_under_way and not single_host and run_state.spec == self._spec and not run_state.end_request
        locked = single_host and not self._state.is_remote
        must_listen = (
            reports and not locked and (self._options.name in reports or not can_join)
        )  # who of them lives: that takes a while
        living = find_living_agents(self._state) if must_listen else {}
        if self._options.name in living:
            raise CkptError(f"another host of this run is called {self._options.name}; give this one another --name")
        if is_under_way and living and (single_host or run_state.spec != self._spec):
            same = "the same command and options as on the other hosts"
            then = "for one job on several hosts give --nnodes on each" if single_host else f"give {same}"
            raise CkptError(
                f"another run is under way there ({_describe_spec(run_state.spec)}); {then}, or another --run-dir or --state"
            )
        if can_join:
            self._run_id = run_state.run
            return True
        has_undrained_memory = not living and memory_placement.node_addresses(
            run_state.memory
        )  # steps that are only in memory: the next run brings them home
        if (
            run_state.is_final
            and not single_host
            and run_state.spec == self._spec
            and not self._options.begin_anew
            and not has_undrained_memory
        ):
            assert run_state.last is not None
            self._status = facts_of(run_state.last, EndFacts).status
            self._print(f"the run has ended: {run_state.last.text}; to begin another, give --again")
            return True
        if (
            run_state.last is None
            and self._memory_nodes is not None
            and (nodes := nodes_with_objects(self._memory_nodes.folder))
        ):
            raise CkptError(
                f"the log of the run is empty, and {nodes[0]} holds steps of a run: the log was lost, or this is another "
                "--state. Give the --state of that run, or another --run-dir; if nobody needs these steps, remove "
                f"{self._memory_nodes.folder}"
            )
        self._run_id = secrets.token_hex(6)
        drafts = [
            draft_run(run_state.attempt + 1, self._run_id, self._spec, _unfinished_reports(run_state, reports)),
            draft_lead(run_state.attempt + 1, f"{self._options.name} coordinates", self._options.name),
        ]
        own_report = self._make_report()
        self._state.publish_report(
            own_report.name, own_report.to_facts()
        )  # before it leads: the others take who says nothing for lost
        if not self._state.append(run_state.number, drafts):
            self._state.remove_report(own_report.name)
            return False
        if run_state.spec is not None and run_state.spec.command != self._spec.command:
            before = " ".join(run_state.spec.command)
            self._print(f"another job was run there ({before}): the record and the ledger go on; give each its own --run-dir")
        failpoint("agent.begun")
        for name in reports.keys() - living.keys() - {own_report.name}:
            self._state.remove_report(name)
        self._read_log()
        return True

    def _read_log(self) -> list[LogEntry]:
        """What was written since."""
        entries = self._state.entries(self._run_state.number)
        self._read_at = time.monotonic()
        self._run_state = self._run_state.apply_entries(entries)
        self._log += entries
        return entries

    # --- following the log -------------------------------------------------------------------------------------

    def _follow_log(self) -> bool:
        """Make the ranks be as the log says; whether there was something to be done."""
        if self._is_log_fresh():
            return False
        for entry in self._read_log():
            if entry.kind == "run" and facts_of(entry, RunFacts).run != self._run_id:
                raise CkptError("another run was begun there, and this one is over; give each its own --run-dir or --state")
            self._print_entry(entry)
            if entry.kind == "end":
                self._status = facts_of(entry, EndFacts).status
                return True
        run_state, last = self._run_state, self._run_state.last
        assert last is not None
        attempt_goes_on = last.kind in ("start", "stop") and run_state.attempt == self._attempt
        if self._monitor is not None and not attempt_goes_on:
            self._account("decide")
            if last.kind == "failure" or (run_state.failures and run_state.failures[-1].cause in ("hang", "stopped")):
                self._monitor.save_stacks()
            self._stop_ranks()
            return True
        own_index = next((i for i, member in enumerate(run_state.members) if self._is_this_agent(member)), None)
        if last.kind == "start" and own_index is not None and run_state.attempt != self._attempt:
            self._account("spawn" if run_state.attempt == 0 else "decide")
            self._start_ranks(run_state.members[own_index], own_index, last)
            return True
        if last.kind == "stop" and self._monitor is not None:
            request = facts_of(last, StopRequest)
            self._monitor.request_stop(request.step, request.agreed)
        return False

    def _is_log_fresh(self) -> bool:
        """Whether the log was read a moment ago, and this agent has not written to it since."""
        is_only_writer = self._spec.hosts == 1 or self._run_state.leader == self._options.name
        return not is_only_writer and time.monotonic() - self._read_at < _READ_SECONDS

    def _is_this_agent(self, member: AttemptHost) -> bool:
        return (member.name, member.incarnation) == (self._options.name, self._incarnation)

    def _print_entry(self, entry: LogEntry) -> None:
        """What the user should know at once."""
        given_up = entry.kind == "end" and facts_of(entry, EndFacts).status == 1 and entry.text != self._last_printed
        remark = entry.kind == "note" and entry.facts
        if entry.kind == "stop" and self._printed_stop_attempt != entry.attempt:
            self._printed_stop_attempt = entry.attempt
            self._print(f"{entry.text}: the ranks save and end, within {self._spec.grace_seconds:g} s")
        elif entry.kind == "decision" or given_up or remark or (self._spec.hosts > 1 and entry.kind in ("lead", "start")):
            self._print(entry.text)
        self._last_printed = entry.text

    def _start_ranks(self, member: AttemptHost, number: int, entry: LogEntry) -> None:
        self._attempt, self._failure = entry.attempt, None
        self._lease.begin_attempt()
        facts, logs = facts_of(entry, StartFacts), self._options.folder / "logs" / str(entry.attempt)
        launch_spec = LaunchSpec(
            self._run_state.run, entry.attempt, member.first, member.count, facts.ranks, number, facts.address,
            facts.port, {**allowed_environment(facts.environment), **self._host_environment()},
        )  # fmt: skip
        self._launch_spec = launch_spec
        failpoint("agent.start")
        try:
            ranks = launch.start(
                self._spec.command, launch_spec, self._pages, logs, self._fork_servers, self._options.through_mpi
            )
        except CkptError as error:
            self._failure = HostFailure(
                "exit", tuple(range(member.first, member.first + member.count)), f"did not start: {error}"
            )
            if self._spec.hosts == 1 and not isinstance(error, Unavailable):
                self._state.append(self._run_state.number, [draft_end(entry.attempt, str(error), 1)])
                raise
            return
        for rank in ranks:
            self._orphan_guard.add(rank.process.pid)
            self._select.register(rank.pidfd, selectors.EVENT_READ, rank)
        self._lease.set_sessions([rank.process.pid for rank in ranks])
        best = max(self._best_step, *(failure.step for failure in self._run_state.failures), -1)  # a spare has seen none of it
        self._monitor = RankMonitor(ranks, self._options.limits, best, self._spec.straggler_seconds)
        self._console.follow(ranks)
        failpoint("agent.started")

    def _host_environment(self) -> dict[str, str]:
        """What the ranks of this host are told beside."""
        variables = {launch.AGENT_VARIABLE: self._incarnation, "TORCHELASTIC_MAX_RESTARTS": str(self._spec.restarts)}
        run_state, name = self._run_state, self._options.name
        now, *before = [each.url(name) for each in run_state.memory] or [""]
        if memory_url := now if self._memory_folder is None else str(self._memory_folder):
            variables[tier_spec.MEMORY_VARIABLE] = memory_url
        if before:
            variables[tier_spec.PREVIOUS_MEMORY_VARIABLE] = " ".join(before)
        if run_state.newest.memory in run_state.memory[1:] and run_state.memory_wait_seconds:
            variables[tier_spec.MEMORY_WAIT_VARIABLE] = f"{run_state.memory_wait_seconds:g} {run_state.newest.memory.url(name)}"
        return variables

    # --- what is only in memory --------------------------------------------------------------------------------

    def _start_memory_nodes(self) -> MemoryNodes | None:
        """Where there are several hosts: what serves the memory of this one to all."""
        options = self._options
        if self._spec.hosts == 1 or options.security is None:
            return None
        folder = local.memory_folder(options.folder, options.name)
        return None if folder is None else MemoryNodes(folder, options.address, options.security)

    def _find_unlisted_nodes(self) -> frozenset[str]:
        """Nodes that hold objects, and that no entry of the log names: nothing proves that nobody needs them."""
        if self._memory_nodes is None:
            return frozenset()
        listed = {at for entry in self._log for at in memory_placement.node_addresses(memories_of(entry))}
        found = (
            frozenset(self._memory_nodes.node_address(path) for path in nodes_with_objects(self._memory_nodes.folder)) - listed
        )
        if found:
            self._print(
                f"{', '.join(sorted(found))}: the log of the run does not name these nodes, and they hold steps; they are "
                f"kept. If nobody needs them, remove their folders in {self._memory_nodes.folder} once this run has ended"
            )
        return found

    def _can_free_memory(self) -> bool:
        """At the end of this agent, whether nothing that its memory holds is needed any more."""
        if self._status is None:  # others go on; or an error has come between
            return self._is_leaving and not self._is_memory_needed()
        return not memory_placement.node_addresses(self._run_state.memory) and not self._unlisted

    def _is_memory_needed(self) -> bool:
        """Whether steps can't be read any more without the memory of this host."""
        name, reports = self._options.name, self._coordinator.reports()
        staying = {other: report for other, report in reports.items() if other != name and not report.leaving}
        return memory_placement.is_needed(self._run_state.memory, name, staying)

    def _drain_memory(self) -> None:
        """What is only in memory comes to where it belongs: on several hosts by who leads, for whom the others wait."""
        if self._memory_folder is None:
            self._wait_for_drain()
            return
        if not (text := local.drain_folder(self._memory_folder)):
            return
        if "has step" not in text:
            self._print(text)
        with contextlib.suppress(StoreError):
            self._state.append(self._run_state.number, [draft_note(max(0, self._run_state.attempt), text)])

    def _wait_for_drain(self) -> None:
        """Until it is done, or one is asked once more to end."""
        signals, until = self._signals.count, time.monotonic() + self._spec.give_up_seconds
        while self._is_drain_pending() and self._signals.count == signals and time.monotonic() < until:
            own_report = replace(self._make_report(), leaving=0)  # who leads now leads to the end
            self._heartbeat.set_report(own_report)
            try:
                if self._run_state.leader == self._options.name:
                    self._drain_as_leader()
                else:
                    self._coordinator.coordinate(self._run_state, own_report)
                for entry in self._read_log():
                    if entry.kind == "memory" and (local.BROUGHT_TEXT in entry.text or memories_of(entry)):
                        self._print(entry.text)
                until = time.monotonic() + self._spec.give_up_seconds
            except StoreError as error:
                self._handle_state_error(error)
            self._poll_ranks()
            self._wait()
        if self._is_drain_pending():
            self._print("what may be only in memory was not brought home; the memory is kept: start ckpt-run again")

    def _drain_as_leader(self) -> None:
        run_state = self._run_state
        done, text = local.drain_urls([each.url() for each in run_state.memory if each.nodes])
        failpoint("agent.home")
        kept = () if done else run_state.memory
        self._state.append(run_state.number, [draft_memory(run_state, kept, text or "no step was only in memory")])

    def _is_drain_pending(self) -> bool:
        """Whether the run has ended, and what is only in memory was not looked after yet."""
        run_state = self._run_state
        return (
            run_state.run == self._run_id
            and run_state.has_ended
            and not run_state.memory_drained
            and bool(memory_placement.node_addresses(run_state.memory))
        )

    def _stop_ranks(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return
        self._best_step = max(self._best_step, monitor.newest)
        self._lease.set_sessions(())
        failpoint("agent.stop")
        for rank in monitor.ranks:
            with contextlib.suppress(KeyError):
                self._select.unregister(rank.pidfd)
        launch.stop(monitor.ranks, self._mark)
        for rank in monitor.ranks:
            self._orphan_guard.remove(rank.process.pid)
        self._port = launch.free_port(self._options.address)
        self._account("stop")

    def _handle_contact_loss(self) -> None:
        """Where contact with the others was lost the ranks have been ended: what is left of them is ended, and reported."""
        self._lease.set_reports(self._coordinator.reports())
        loss, monitor = self._lease.take_loss(), self._monitor
        if loss is None or monitor is None or (monitor.has_ended and monitor.failure is None):  # all had ended well before
            return
        self._print(loss.user_message)
        self._stop_ranks()
        self._failure = HostFailure("lost", (), loss.detail, loss.seconds)
        self._heartbeat.set_report(self._make_report())

    # --- what the ranks do -------------------------------------------------------------------------------------

    def _poll_ranks(self) -> None:
        if self._memory_nodes is not None:
            self._memory_nodes.update(memory_placement.node_addresses(self._run_state.memory) | self._unlisted)
        if self._monitor is not None:
            self._monitor.is_leaving = bool(self._signals.first)
            for rank in self._monitor.poll(time.monotonic()):
                self._select.unregister(rank.pidfd)
            if time.monotonic() >= self._tidy_at:
                self._tidy_at = time.monotonic() + _TIDY_SECONDS
                processes.reap_orphans()
                self._orphan_guard.ensure_running()
                if (folder := self._memory_folder if self._memory_nodes is None else self._memory_nodes.folder) is not None:
                    self._memory_used_bytes = local.used_bytes(folder)
                if self._fork_servers is not None:
                    launch.prepare_fork_server(self._fork_servers, self._launch_spec, self._pages)

    def _make_report(self) -> AgentReport:
        monitor, options = self._monitor, self._options
        report = AgentReport(
            options.name,
            self._incarnation,
            self._joined_at,
            os.getpid(),
            str(self._pages),
            str(options.folder / "logs"),
            options.address,
            self._port,
            self._attempt,
            wrong=self._failure,
            leaving=self._signals.first,
            hurry=self._signals.count > 1,
            warm="" if self._fork_servers is None else self._fork_servers.status_text,
            held_bytes=self._memory_used_bytes,
        )
        if (memory_nodes := self._memory_nodes) is not None:
            report = replace(report, memory=memory_nodes.state, nodes=memory_nodes.nodes, fresh=memory_nodes.fresh)
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

    def _coordinate(self) -> bool:
        """Take part in deciding; whether something was written."""
        own_report = self._make_report()
        self._heartbeat.set_report(own_report)
        before = self._run_state
        assert self._time_accounting is not None
        try:
            return self._coordinator.coordinate(before, own_report)
        finally:  # also where it can't be known whether something was written: what was heard is heard once
            self._time_accounting.account_by_reports(before, own_report)

    def _account(self, name: TimeCategory) -> None:
        assert self._time_accounting is not None
        self._time_accounting.account(self._run_state, name)

    def _serve_metrics(self) -> HttpPages | None:
        if self._options.metrics is None:
            return None
        host, port = self._options.metrics
        try:
            return metrics.serve(host, port, self._render_metrics)
        except OSError as error:
            self._print(f"no metrics are served: {host}:{port} can't be listened on: {error.strerror}; give another --metrics")
            return None

    def _render_metrics(self) -> str:
        monitor = self._monitor
        beats = {} if monitor is None else monitor.heartbeats
        return metrics.render_metrics(
            list(self._log),
            total_seconds_by_category(self._options.folder),
            True,
            beats,
            time.monotonic(),
            self._memory_used_bytes,
        )

    # --- the end -----------------------------------------------------------------------------------------------

    def _can_leave(self) -> bool:
        """Whether the run can do without this agent, which was asked to end."""
        last = self._run_state.last
        assert last is not None
        if self._monitor is None and self._spec.hosts > 1 and last.kind == "decision":
            self._is_leaving = True
        if self._monitor is None and last.kind == "start" and not any(map(self._is_this_agent, self._run_state.members)):
            self._is_leaving = True
        if self._is_leaving and not self._is_memory_needed():
            return True
        return time.monotonic() - self._signals.first_at > self._leave_seconds  # nobody decides any more

    def _handle_state_error(self, error: StoreError) -> None:
        """The state does not answer: the ranks go on, and only what goes wrong meanwhile has to wait."""
        if not self._state_error:
            self._print(f"{error}. The ranks go on; what happens to them is dealt with when it answers again")
        self._state_error = str(error)
        waits, self._pending_text = self._pending_text, self._describe_pending()
        if self._pending_text and self._pending_text != waits:
            self._print(self._pending_text)

    def _describe_pending(self) -> str:
        """What has come to pass, and has to wait for the state; "" nothing."""
        monitor = self._monitor
        if self._signals.first:
            name = signal.Signals(self._signals.first).name
            return (
                f"{name}: without the state the ranks can't be asked to save; they are ended within {self._leave_seconds:g} s"
            )
        if monitor is not None and monitor.failure is not None:
            failure = monitor.failure
            return f"{describe_failure(failure.ranks, failure.detail)}; what is done about it is decided when the state answers"
        if monitor is not None and monitor.has_ended:
            return "all ranks of this host have ended well; the run ends when the state answers, or by another signal"
        return ""

    @property
    def _leave_seconds(self) -> float:
        """Seconds that it waits for who decides, once it was asked to end."""
        return self._spec.grace_seconds + 2 * LOST_SECONDS

    def _wait(self) -> None:
        """Until something happens, and not for long."""
        for key, _ in self._select.select(_TICK_SECONDS):
            if key.data is self._signals:
                self._signals.clear_wakeup()


def _unfinished_reports(run_state: RunState, facts_by_name: Mapping[str, Mapping[str, Any]]) -> list[AgentReport]:
    """The reports of the newest attempt, where the agents ended before one of them wrote what became of it."""
    if run_state.last is None or run_state.last.kind not in ("start", "stop"):
        return []
    return [each for each in decode_reports(facts_by_name).values() if each.attempt == run_state.attempt]


def _shared_memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _describe_spec(spec: RunSpec | None) -> str:
    if spec is None:
        return ""
    ranks = f"{format_count(spec.ranks, 'rank')}{' each' if spec.hosts > 1 else ''}"
    return f"{format_count(spec.hosts, 'host')} with {ranks}: {' '.join(spec.command)}"
