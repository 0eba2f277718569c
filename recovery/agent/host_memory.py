"""`HostMemory`, the memory tier of this host: a folder if the run has one host, else a process with nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.memory_tier import local
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes, nodes_with_steps
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_facts import memories_of
from ckpt.recovery.run_log.run_state import RunState
from ckpt.tiers.memory_folder import MEMORY_VARIABLE, MEMORY_WAIT_VARIABLE, PREVIOUS_MEMORY_VARIABLE


class HostMemory:
    """The memory tier of this host. The main thread owns it; other threads may read `used_bytes`."""

    def __init__(self, options: HostOptions, single_host: bool) -> None:
        self._options, self._single_host = options, single_host
        self.folder = local.memory_folder(options.folder) if single_host else None
        """The folder of the memory tier in a run on one host; else None."""
        self.unserved_folder = local.memory_folder(options.folder, options.name) if single_host else None
        """In a run on one host: the folder of the nodes that this host served in runs on several hosts."""
        self.used_bytes = 0
        """The bytes of memory that saved steps take on this host, as measured last."""
        self._nodes: MemoryNodes | None = None
        self._unlisted: frozenset[str] = frozenset()

    def start_nodes(self) -> None:
        """In a run on several hosts, start the process that serves memory nodes of this host to all hosts."""
        options = self._options
        if self._single_host or options.security is None:
            return
        folder = local.memory_folder(options.folder, options.name)
        self._nodes = None if folder is None else MemoryNodes(folder, options.address, options.security)

    @property
    def nodes_folder(self) -> Path | None:
        """The folder with the data of all nodes; None: no nodes are served."""
        return None if self._nodes is None else self._nodes.folder

    def find_unlisted(self, entries: Sequence[LogEntry]) -> frozenset[str]:
        """Return the nodes that may have steps although no entry of the log names them.

        They are kept, because nothing proves that nobody needs them. Raises StoreError if the nodes can't be read.
        """
        if self._nodes is None:
            return frozenset()
        listed = {at for entry in entries for at in memory_placement.node_addresses(memories_of(entry))}
        found = frozenset(self._nodes.node_address(path) for path in nodes_with_steps(self._nodes.folder))
        self._unlisted = found - listed
        return self._unlisted

    def update(self, run_state: RunState) -> None:
        """Serve the nodes that are needed, and no others. The agent calls this several times a second."""
        if self._nodes is not None:
            self._nodes.update(memory_placement.node_addresses(run_state.memory) | self._unlisted)

    def measure(self) -> None:
        """Measure how much memory the saved steps take."""
        if (folder := self.folder if self._nodes is None else self._nodes.folder) is not None:
            self.used_bytes = local.used_bytes(folder)

    def add_to_report(self, report: AgentReport) -> AgentReport:
        """Return the report with the fields that are about the memory of this host."""
        report = replace(report, memory_used_bytes=self.used_bytes)
        if (nodes := self._nodes) is None:
            return report
        return replace(report, memory=nodes.state, nodes=nodes.nodes, fresh=nodes.fresh)

    def rank_environment(self, run_state: RunState) -> dict[str, str]:
        """Return the environment variables that name the memory namespaces for the ranks of this host."""
        variables, name = {}, self._options.name
        current, *previous = [namespace.url(name) for namespace in run_state.memory] or [""]
        if memory_url := current if self.folder is None else str(self.folder):
            variables[MEMORY_VARIABLE] = memory_url
        if previous:
            variables[PREVIOUS_MEMORY_VARIABLE] = " ".join(previous)
        if run_state.newest.memory in run_state.memory[1:] and run_state.memory_wait_seconds:
            variables[MEMORY_WAIT_VARIABLE] = f"{run_state.memory_wait_seconds:g} {run_state.newest.memory.url(name)}"
        return variables

    def is_needed(self, run_state: RunState, reports: Mapping[str, AgentReport]) -> bool:
        """Return whether some steps are unreadable without the memory of this host."""
        name = self._options.name
        staying = {other: report for other, report in reports.items() if other != name and not report.leaving}
        return memory_placement.is_needed(run_state.memory, name, staying)

    def is_unused(self, run_state: RunState) -> bool:
        """Return whether, after the end of the run, no step in the nodes is needed any more."""
        return not any(self._options.name in dict(memory.nodes) for memory in run_state.memory) and not self._unlisted

    def close_nodes(self) -> None:
        """End the process that serves the nodes. Their data stays."""
        if self._nodes is not None:
            self._nodes.close()

    def remove_nodes(self) -> None:
        """Delete the data of all nodes, after `close_nodes`."""
        if self._nodes is not None:
            self._nodes.remove()
