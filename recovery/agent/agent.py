"""`Agent`, the part of `ckpt-run` on one host: it creates the parts of the agent, runs its loop and closes them.

The agent starts the ranks that the run log assigns to this host, watches them, ends them when the log requires it, and
publishes reports. One agent also leads the run: its coordinator appends the entries of the run log that all agents follow
(recovery/coordinator/coordinator.py). The loop of an agent is in agent_loop.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ckpt.recovery.agent import metrics
from ckpt.recovery.agent.agent_heartbeat import AgentHeartbeat
from ckpt.recovery.agent.agent_identity import AgentIdentity
from ckpt.recovery.agent.agent_loop import AgentLoop, AgentParts, make_report
from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.agent.host_lease import HostLease
from ckpt.recovery.agent.host_memory import HostMemory
from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.agent.host_ranks import HostRanks, RankSurroundings
from ckpt.recovery.agent.joining import Joined, Joining, JoinRequest
from ckpt.recovery.agent.log_console import LogConsole
from ckpt.recovery.agent.time_accounting import TimeAccounting
from ckpt.recovery.agent.user_messages import UserMessages
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.goodput.ledger import total_seconds_by_category
from ckpt.recovery.ranks import launch, process_kill
from ckpt.recovery.ranks.fork_client import ForkServers
from ckpt.recovery.ranks.orphan_guard import OrphanGuard
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS
from ckpt.recovery.run_log.base import RunLog
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.http_pages import HttpPages

log = logging.getLogger("ckpt.run")


class Agent:
    """The agent of this host. The main thread owns it. Threads of the HTTP server call only `_render_metrics`."""

    def __init__(self, spec: RunSpec, options: HostOptions, run_log: RunLog, print_line: Callable[[str], None]) -> None:
        self._spec, self._options = spec, options
        self._incarnation, self._joined_at = secrets.token_hex(8), time.time()
        self._port = launch.free_port(options.address)
        self._log = FollowedLog(run_log)
        self._messages = UserMessages(print_line, spec)
        use_fork_server = options.use_fork_server and not options.through_mpi
        self._fork_servers = ForkServers(spec.command) if use_fork_server else None
        self._memory = HostMemory(options, spec.hosts == 1)
        self._signals = Signals()
        self._joined: Joined | None = None
        self._accounting: TimeAccounting | None = None
        self._loop: AgentLoop | None = None
        self._has_ledger_failed = False  # only the threads that serve metrics use it; two of them may print one warning each
        self._printed_unlisted: frozenset[str] = frozenset()

    def run(self) -> int:
        """Run until the end of the job and return the exit status.

        0: the job has ended with success, or `ckpt-run drain` has ended it. 1: it was given up. 128 + n: signal n has ended it.
        """
        process_kill.adopt_orphans()
        with contextlib.closing(selectors.DefaultSelector()) as select, self._signals.installed(select):
            # The folder of the heartbeat pages of the ranks (ckpt/training/heartbeat_page.py).
            pages = Path(tempfile.mkdtemp(prefix="ckpt-run-", dir=_shared_memory_folder()))
            try:
                return self._run_with_pages(select, pages)
            finally:
                shutil.rmtree(pages, ignore_errors=True)

    def _run_with_pages(self, select: selectors.BaseSelector, pages: Path) -> int:
        options = self._options
        identity = AgentIdentity(
            options.name, self._incarnation, self._joined_at, pages, options.folder / "logs", options.address, self._port
        )
        with contextlib.ExitStack() as closing:  # closes in reverse order
            closing.callback(self._close_accounting)
            orphan_guard = OrphanGuard(identity.mark, pages, LOST_SECONDS if self._spec.hosts > 1 else 0.0)
            closing.callback(orphan_guard.close)
            console = LogConsole(options.shown_output)
            closing.callback(console.close)
            if self._fork_servers is not None:
                closing.callback(self._fork_servers.close)
            surroundings = RankSurroundings(pages, select, orphan_guard, console, self._fork_servers)
            ranks = HostRanks(self._spec, options, identity, surroundings)
            if (metrics_server := self._serve_metrics(ranks)) is not None:
                closing.callback(metrics_server.close)
            closing.callback(self._close_memory)
            self._memory.start_nodes()
            self._joined = self._join(identity, ranks)
            if self._joined.status is not None:
                return self._joined.status
            return self._run_joined(identity, surroundings, ranks, self._joined)

    def _join(self, identity: AgentIdentity, ranks: HostRanks) -> Joined:
        request = JoinRequest(
            identity.name, self._spec, self._options.begin_anew, self._memory.nodes_folder or self._memory.unserved_folder,
            lambda: make_report(identity, self._signals, ranks, self._memory),
        )  # fmt: skip
        joined = Joining(self._log, request, self._signals, self._messages.print).join()
        ranks.past = joined.past
        self._print_unlisted_nodes()
        return joined

    def _print_unlisted_nodes(self) -> bool:
        """Print the nodes in the memory of this host that may have steps although the log does not name them, each once.

        Returns whether there are any. Raises StoreError if the nodes can't be read.
        """
        unlisted = self._memory.find_unlisted(self._log.entries)
        if new := sorted(unlisted - self._printed_unlisted):
            self._printed_unlisted |= unlisted
            self._messages.print(
                f"{', '.join(new)}: the log of the run does not name these nodes, but they have steps, so "
                f"they are kept. If nobody needs them, remove their folders in {self._memory.nodes_folder} after this run"
            )
        return bool(unlisted)

    def _run_joined(self, identity: AgentIdentity, surroundings: RankSurroundings, ranks: HostRanks, joined: Joined) -> int:
        run_log, single_host = self._log.run_log, self._spec.hosts == 1
        coordinator = Coordinator(run_log, single_host)
        self._accounting = TimeAccounting(self._options.folder, identity.name, single_host, self._log, coordinator)
        if joined.has_begun_run:
            self._accounting.account_start(self._log.run_state)
        with contextlib.closing(HostLease(run_log, surroundings.orphan_guard, identity.name, self._spec.least)) as lease:
            report = make_report(identity, self._signals, ranks, self._memory)
            heartbeat = AgentHeartbeat(run_log, report, lease, single_host)
            parts = AgentParts(
                identity=identity,
                spec=self._spec,
                run_id=joined.run_id,
                signals=self._signals,
                select=surroundings.select,
                messages=self._messages,
                log=self._log,
                ranks=ranks,
                memory=self._memory,
                coordinator=coordinator,
                accounting=self._accounting,
                lease=lease,
                heartbeat=heartbeat,
            )
            self._loop = AgentLoop(parts)
            try:
                return self._loop.run()
            finally:
                self._loop.finish()
                heartbeat.close()

    def _serve_metrics(self, ranks: HostRanks) -> HttpPages | None:
        if self._options.metrics is None:
            return None
        host, port = self._options.metrics
        try:
            return metrics.serve(host, port, lambda: self._render_metrics(ranks))
        except OSError as error:
            self._messages.print(
                f"no metrics are served: {host}:{port} can't be listened on: {error.strerror}; give another --metrics"
            )
            return None

    def _render_metrics(self, ranks: HostRanks) -> str:
        """Return the metrics page. It is called from threads of the HTTP server."""
        return metrics.render_metrics(
            self._log.entries, self._read_seconds(), True, ranks.heartbeats, time.monotonic(), self._memory.used_bytes
        )

    def _read_seconds(self) -> Mapping[str, float]:
        """Return the seconds of each category; none if a ledger can't be read now, as the other metrics are served anyway."""
        try:
            seconds = total_seconds_by_category(self._options.folder)
        except OSError as error:
            if not self._has_ledger_failed:
                log.warning(
                    "the metrics have no times: %s can't be read: %s; check the disk and the permissions of --run-dir",
                    error.filename, error.strerror,
                )  # fmt: skip
            self._has_ledger_failed = True
            return {}
        self._has_ledger_failed = False
        return seconds

    # --- close ---------------------------------------------------------------------------------------------------

    def _close_memory(self) -> None:
        """End the nodes in the memory of this host, and free the memory if none of its steps is needed any more."""
        if self._memory.nodes_folder is None:
            return
        run_state, has_ended = self._log.run_state, self._has_run_ended()
        can_leave_now = self._loop is not None and self._loop.can_free_memory()
        free = self._memory.is_unused(run_state) if has_ended else can_leave_now
        self._memory.close_nodes()  # before the last look at them: nobody writes to them any more
        try:
            free = free and not self._print_unlisted_nodes()
        except StoreError as error:
            free = False
            self._messages.print(f"the memory is kept, as it is not known what it has: {error}")
        if free:
            self._memory.remove_nodes()
        if not has_ended and not free and memory_placement.node_addresses(run_state.memory):
            self._messages.print("the run has not ended, and the memory is kept: start ckpt-run again")

    def _has_run_ended(self) -> bool:
        if self._loop is not None:
            return self._loop.status is not None
        return self._joined is not None and self._joined.status is not None and self._log.run_state.has_ended

    def _close_accounting(self) -> None:
        if self._accounting is not None:
            self._accounting.close(self._log.run_state)


def _shared_memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
