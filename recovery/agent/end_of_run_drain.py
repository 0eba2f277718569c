"""Drains the memory tier after the end of a run: copies steps that are only in memory to the repository."""

from __future__ import annotations

import contextlib

from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.agent.host_memory import HostMemory
from ckpt.recovery.agent.user_messages import UserMessages
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.memory_tier import local
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.entry_drafts import draft_memory, draft_note
from ckpt.recovery.run_log.entry_facts import memories_of
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.tiers.drain_report import DrainReport, has_copied_step_line


def drain_host_memory(memory: HostMemory, log: FollowedLog, messages: UserMessages) -> None:
    """Drain the memory folder of a run on one host, and write the result into the log."""
    if memory.folder is None or not (report := local.drain_folder(memory.folder)).text:
        return
    if report.has_copied or report.has_failed:  # else the repository had the newest step already
        messages.print(report.text)
    with contextlib.suppress(StoreError):
        log.append([draft_note(max(0, log.run_state.attempt), report.text)])


class SharedMemoryDrain:
    """The drain of a run on several hosts: the leader drains the memory of all hosts, and the other agents wait for it."""

    def __init__(self, log: FollowedLog, coordinator: Coordinator, messages: UserMessages, run_id: str, name: str) -> None:
        self._log, self._coordinator, self._messages = log, coordinator, messages
        self._run_id, self._name = run_id, name

    def is_pending(self) -> bool:
        """Return whether the run has ended and its memory is not yet drained."""
        run_state = self._log.run_state
        return (
            run_state.run == self._run_id
            and run_state.has_ended
            and not run_state.memory_drained
            and bool(memory_placement.node_addresses(run_state.memory))
        )

    def advance(self, own_report: AgentReport) -> None:
        """Drain the memory if this agent leads, or check whether the leader has. Raises StoreError."""
        if self._log.run_state.leader == self._name:
            self._drain()
        else:
            self._coordinator.coordinate(self._log.run_state, own_report)
        for entry in self._log.read():
            if entry.kind == "memory" and (has_copied_step_line(entry.text) or memories_of(entry)):
                self._messages.print(entry.text)

    def _drain(self) -> None:
        run_state = self._log.run_state
        urls = [namespace.url() for namespace in run_state.memory if namespace.nodes]
        report = local.drain_urls(urls, rolled_back=run_state.restore_step_limit is not None)
        failpoint("agent.drain")
        kept, text = run_state.memory if report.has_failed else (), report.text or "no step was only in memory"
        if not report.has_failed and _has_newer_unread_step(run_state, report):
            kept, hosts = (run_state.newest.memory,), ", ".join(host for host, _ in run_state.newest.memory.nodes)
            text += (
                f"; step {run_state.newest.step} may be in the memory of {hosts}, which does not answer: this memory is kept: "
                "start ckpt-run there again"
            )
        self._log.append([draft_memory(run_state, kept, text)])


def _has_newer_unread_step(run_state: RunState, report: DrainReport) -> bool:
    """Return whether memory that did not answer may have a newer step of this job than all that were read."""
    newest = run_state.newest
    is_newer = newest.step > max(report.newest_step, newest.durable)
    return is_newer and newest.memory.url() in report.unread and run_state.restore_step_limit is None  # else it may be bad
