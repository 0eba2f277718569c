"""Which memory nodes of which hosts store the steps of a run: the namespace to write to, and older ones. Pure.

Each host serves storage nodes from its own memory (memory_nodes.py). One node of each host of an attempt form a namespace
with two copies of everything, so that one host may be lost. Each attempt has new nodes even on the same hosts, so the
left-over files of killed writers go with the old nodes. Older namespaces are only read, until the new one has a newer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ckpt.recovery.policy.failure import Failure

_MAX_OLDER = 3


class MemoryReport(Protocol):
    """The part of an agent's report that is about the memory of its host."""

    @property
    def memory(self) -> str:
        """The state of its `fresh` node: off, coming, ready."""

    @property
    def fresh(self) -> str:
        """HOST:PORT of the node that no attempt has used yet."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """HOST:PORT of all nodes that it serves."""

    @property
    def saved(self) -> int:
        """The newest step that its ranks have committed in this attempt; -1 none."""


@dataclass(frozen=True, slots=True)
class MemoryNamespace:
    """A namespace of memory nodes, one on each of some hosts."""

    nodes: tuple[tuple[str, str], ...] = ()
    """Host and HOST:PORT of each node, in order; empty if the hosts serve none."""

    def url(self, host: str = "") -> str:
        """Return the URL for the ranks of a host, which names the node of that host as the near one."""
        if not self.nodes:
            return ""
        own_node = dict(self.nodes).get(host)
        near = f"&near={own_node}" if own_node else ""
        return f"ckpt://{','.join(at for _, at in self.nodes)}?redundancy={min(2, len(self.nodes))}x{near}"


@dataclass(frozen=True, slots=True)
class NewestStep:
    """The newest step that a job has saved, and which memory namespace has it, by the ends of its attempts."""

    step: int = -1
    durable: int = -1
    """The newest step of its training line that is committed outside of the memory of hosts."""
    memory: MemoryNamespace = MemoryNamespace()
    """The memory of the attempt that saved the newest step that may be restored."""
    at_stake: int = 0
    """How many steps must be repeated if that memory can't be read."""
    step_seconds: float = 0.0
    line: int = 0
    """The newest training line on which an attempt has committed a step."""

    def after(self, failure: Failure, memory: MemoryNamespace, rolled_back: bool) -> NewestStep:
        """Return the newest step after one more attempt.

        failure: how the attempt ended.
        memory: the namespace that it saved to.
        rolled_back: whether it had to restore an older step than the newest.
        """
        step, durable = max(self.step, failure.committed), max(self.durable, failure.durable)
        program_rolled_back = failure.line > self.line and failure.restored < self.step and not rolled_back
        if program_rolled_back:  # the program rolled back by itself, so the steps that it left behind are not restored any more
            step = failure.committed
            durable = min(step, max(failure.durable, min(self.durable, failure.restored)))
        saved = failure.committed > failure.restored
        line = max(self.line, failure.line)
        found = NewestStep(step, durable, self.memory, step - durable, failure.step_seconds or self.step_seconds, line)
        if rolled_back:
            found = replace(found, at_stake=failure.committed - failure.restored if saved else self.at_stake)
        newer = rolled_back or program_rolled_back or failure.committed > self.step
        return replace(found, memory=memory) if saved and newer else found


def choose_memories(
    before: Sequence[MemoryNamespace], reports: Mapping[str, MemoryReport], newest: Sequence[MemoryNamespace] = ()
) -> tuple[MemoryNamespace, ...] | None:
    """Return the memory namespaces of a new attempt; None: wait for a node that is about to be ready.

    The first namespace is written to, the others are only read.

    before: the namespaces of the attempt before, in the same order.
    reports: those of the hosts that take part.
    newest: the namespaces that have the newest step of this job, and of other jobs.
    """
    if any(report.memory == "coming" for report in reports.values()):
        return None
    fresh = sorted((name, report.fresh) for name, report in reports.items() if report.memory == "ready")
    if len(fresh) < min(2, len(reports)):  # one node alone is lost with its host, and all hosts would write to it
        fresh = []
    new = MemoryNamespace(tuple(fresh))
    older = [memory for memory in before if memory.nodes]
    if len(older) > _MAX_OLDER:  # the oldest has the newest step that is certain; the attempts since may have saved none
        kept = {*older[: _MAX_OLDER - 1], older[-1], *newest}
        older = [memory for memory in older if memory in kept]
    return (new, *older) if new.nodes or older else ()


def is_newer(memories: Sequence[MemoryNamespace], reports: Sequence[MemoryReport], than_step: int = -1) -> bool:
    """Return whether the first namespace has a newer step than all namespaces that are only read, and is as safe as they are.

    An attempt on one host has one copy of its steps, so that an older step with two copies is still needed.

    than_step: the newest step that was ever saved.
    """
    if len(memories) < 2 or _tolerated_losses(memories[0]) < max(map(_tolerated_losses, memories[1:])):
        return False
    return any(report.saved > than_step for report in reports)


def is_readable(memory: MemoryNamespace, reports: Mapping[str, MemoryReport]) -> bool:
    """Return whether the hosts that report serve enough nodes of a namespace to read it."""
    served = {at for report in reports.values() for at in report.nodes}
    return sum(at not in served for _, at in memory.nodes) <= _tolerated_losses(memory)


def hosts_to_await(memory: MemoryNamespace, reports: Mapping[str, MemoryReport]) -> tuple[str, ...]:
    """Return the silent hosts that may have the only readable copies: without them too few nodes answer.

    A silent host may be slow. A host that reports but no longer serves its node has lost it, so it is not awaited.

    reports: the reports of all hosts that are not silent.
    """
    served = {at for report in reports.values() for at in report.nodes}
    absent = [host for host, at in memory.nodes if at not in served]
    gone = [host for host in absent if host in reports and reports[host].memory != "coming"]
    if is_readable(memory, reports) or len(gone) > _tolerated_losses(memory):
        return ()
    return tuple(host for host in absent if host not in gone)


def is_needed(memories: Sequence[MemoryNamespace], host: str, others: Mapping[str, MemoryReport]) -> bool:
    """Return whether a namespace becomes unreadable when this host ends. others: the reports of the hosts that stay."""
    return any(host in dict(memory.nodes) and not is_readable(memory, others) for memory in memories)


def _tolerated_losses(memory: MemoryNamespace) -> int:
    """Return how many nodes of a namespace may be missing: there are two copies if there are two nodes."""
    return min(2, len(memory.nodes)) - 1


def node_addresses(memories: Sequence[MemoryNamespace]) -> set[str]:
    """Return HOST:PORT of the nodes of all these namespaces."""
    return {at for memory in memories for _, at in memory.nodes}


def to_facts(memories: Sequence[MemoryNamespace]) -> list[list[tuple[str, str]]]:
    """Return the namespaces as they are written into an entry of the run log."""
    return [list(memory.nodes) for memory in memories]


def from_facts(facts: Sequence[Sequence[tuple[str, str]]]) -> tuple[MemoryNamespace, ...]:
    """Return the memory namespaces that an entry lists as host and HOST:PORT of each node."""
    return tuple(MemoryNamespace(tuple((host, at) for host, at in nodes)) for nodes in facts)
