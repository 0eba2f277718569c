"""Where the steps that a run holds in the memory of its hosts are, and where they may be from before. Pure.

Each host serves nodes from its own memory (keeper.py). One of each host of an attempt are a namespace, with two copies of
everything, so that one host may be lost. Each attempt has fresh nodes, whatever hosts it has: what writers that were killed
have left behind goes with the old ones. Those before are only read, until something newer is in the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ckpt.recovery.policy.decide import Failure

_MAX_OLDER = 3


class MemoryReport(Protocol):
    """What an agent reports of the memory of its host."""

    @property
    def memory(self) -> str:
        """Of its `fresh` node: off, coming, ready."""

    @property
    def fresh(self) -> str:
        """HOST:PORT of the node that nobody has used yet."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """HOST:PORT of all that it serves."""

    @property
    def saved(self) -> int:
        """The newest step that its ranks have committed in this attempt; -1 none."""


@dataclass(frozen=True, slots=True)
class MemoryNamespace:
    """Nodes of some hosts, as one namespace."""

    nodes: tuple[tuple[str, str], ...] = ()
    """Host and HOST:PORT of its node, in order; none where the hosts serve none."""

    def url(self, host: str = "") -> str:
        """As the ranks of a host name it: their own node is the near one."""
        if not self.nodes:
            return ""
        here = dict(self.nodes).get(host)
        near = f"&near={here}" if here else ""
        return f"ckpt://{','.join(at for _, at in self.nodes)}?redundancy={min(2, len(self.nodes))}x{near}"


@dataclass(frozen=True, slots=True)
class NewestStep:
    """The newest step that a job has saved, and which memory has it: as the ends of its attempts reported."""

    step: int = -1
    durable: int = -1
    """The newest step of its line of training that is committed in another place than the memory of hosts."""
    memory: MemoryNamespace = MemoryNamespace()
    """Of the attempt that saved the newest step that may be restored."""
    at_stake: int = 0
    """How many steps are to be done again if that memory can't be read."""
    step_seconds: float = 0.0
    line: int = 0
    """Its line of training, as far as an attempt has committed a step on it."""

    def after(self, failure: Failure, memory: MemoryNamespace, rolled_back: bool) -> NewestStep:
        """With an attempt more, which saved to this memory. rolled_back: it had to restore an older step than the newest."""
        step, durable = max(self.step, failure.committed), max(self.durable, failure.durable)
        went_back = failure.line > self.line and failure.restored < self.step and not rolled_back
        if went_back:  # the program itself: what it has left behind is of no use any more
            step = failure.committed
            durable = min(step, max(failure.durable, min(self.durable, failure.restored)))
        saved = failure.committed > failure.restored
        line = max(self.line, failure.line)
        found = NewestStep(step, durable, self.memory, step - durable, failure.step_seconds or self.step_seconds, line)
        if rolled_back:
            found = replace(found, at_stake=failure.committed - failure.restored if saved else self.at_stake)
        newer = rolled_back or went_back or failure.committed > self.step
        return replace(found, memory=memory) if saved and newer else found


def choose_memories(
    before: Sequence[MemoryNamespace], members: Mapping[str, MemoryReport], newest: MemoryNamespace = MemoryNamespace()
) -> tuple[MemoryNamespace, ...] | None:
    """The memories of an attempt that begins: the first is written to, the others are only read. None: wait for a node that is
    about to be ready.

    before: of the attempt before, likewise. members: what the hosts that take part say. newest: which has the newest step.
    """
    if any(report.memory == "coming" for report in members.values()):
        return None
    fresh = sorted((name, report.fresh) for name, report in members.items() if report.memory == "ready")
    if len(fresh) < min(2, len(members)):  # a lone node would not outlive its host, and all would write to it
        fresh = []
    new = MemoryNamespace(tuple(fresh))
    older = [memory for memory in before if memory.nodes]
    if len(older) > _MAX_OLDER:  # the last has the newest step that is certain; after it none of them may have got that far
        kept = {*older[: _MAX_OLDER - 1], older[-1], newest}
        older = [memory for memory in older if memory in kept]
    return (new, *older) if new.nodes or older else ()


def is_newer(memories: Sequence[MemoryNamespace], reports: Sequence[MemoryReport], than_step: int = -1) -> bool:
    """Whether the first has a newer step than all that are only read. than: the newest step that was ever saved; what is older
    than it may be all that the first has."""
    return len(memories) > 1 and any(report.saved > than_step for report in reports)


def is_readable(memory: MemoryNamespace, reports: Mapping[str, MemoryReport]) -> bool:
    """Whether enough of its nodes are served by the hosts that report."""
    served = {at for report in reports.values() for at in report.nodes}
    return sum(at not in served for _, at in memory.nodes) <= _tolerated_losses(memory)


def hosts_to_await(memory: MemoryNamespace, reports: Mapping[str, MemoryReport]) -> tuple[str, ...]:
    """The silent hosts that may have the only readable copies: without one of them too few nodes answer.

    A silent host may be slow. One that reports, and serves its node no more, has lost it: it is not waited for.

    reports: of all hosts that are not silent.
    """
    served = {at for report in reports.values() for at in report.nodes}
    absent = [host for host, at in memory.nodes if at not in served]
    gone = [host for host in absent if host in reports and reports[host].memory != "coming"]
    if is_readable(memory, reports) or len(gone) > _tolerated_losses(memory):
        return ()
    return tuple(host for host in absent if host not in gone)


def is_needed(memories: Sequence[MemoryNamespace], host: str, others: Mapping[str, MemoryReport]) -> bool:
    """Whether a memory can't be read any more once this host ends. others: the reports of those that stay."""
    return any(host in dict(memory.nodes) and not is_readable(memory, others) for memory in memories)


def _tolerated_losses(memory: MemoryNamespace) -> int:
    """How many of its nodes may be missing: there are two copies where there are two nodes."""
    return min(2, len(memory.nodes)) - 1


def node_addresses(memories: Sequence[MemoryNamespace]) -> set[str]:
    """The nodes of all of them."""
    return {at for memory in memories for _, at in memory.nodes}


def to_facts(memories: Sequence[MemoryNamespace]) -> list[list[tuple[str, str]]]:
    return [list(memory.nodes) for memory in memories]


def from_facts(facts: Sequence[Any]) -> tuple[MemoryNamespace, ...]:
    return tuple(MemoryNamespace(tuple((host, at) for host, at in nodes)) for nodes in facts)
