"""After the end of a run: steps that are only in memory are copied to where they belong, and the memory is given up."""

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
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import failpoint


def drain_host_memory(memory: HostMemory, log: FollowedLog, messages: UserMessages) -> None:
    """Of a run on one host: drain the folder in its memory."""
    if memory.folder is None or not (text := local.drain_folder(memory.folder)):
        return
    if "has step" not in text:
        messages.print(text)
    with contextlib.suppress(StoreError):
        log.append([draft_note(max(0, log.run_state.attempt), text)])


class SharedMemoryDrain:
    """Of a run on several hosts: who leads drains the memory of all, and the others wait for it."""

    def __init__(self, log: FollowedLog, coordinator: Coordinator, messages: UserMessages, run_id: str, name: str) -> None:
        self._log, self._coordinator, self._messages = log, coordinator, messages
        self._run_id, self._name = run_id, name

    def is_pending(self) -> bool:
        """Whether the run has ended, and what is only in memory was not looked after yet."""
        run_state = self._log.run_state
        return (
            run_state.run == self._run_id
            and run_state.has_ended
            and not run_state.memory_drained
            and bool(memory_placement.node_addresses(run_state.memory))
        )

    def advance(self, own_report: AgentReport) -> None:
        """Drain it, or see whether another has. Raises StoreError where the state does not answer."""
        if self._log.run_state.leader == self._name:
            self._drain()
        else:
            self._coordinator.coordinate(self._log.run_state, own_report)
        for entry in self._log.read():
            if entry.kind == "memory" and (local.BROUGHT_TEXT in entry.text or memories_of(entry)):
                self._messages.print(entry.text)

    def _drain(self) -> None:
        run_state = self._log.run_state
        done, text = local.drain_urls([each.url() for each in run_state.memory if each.nodes])
        failpoint("agent.home")
        kept = () if done else run_state.memory
        self._log.append([draft_memory(run_state, kept, text or "no step was only in memory")])
