"""Where the steps that a run holds in the memory of its hosts are, and where they may be from before. Pure.

Each host serves nodes from its own memory (keeper.py). One of each host of an attempt are a namespace, with two copies of
everything, so that one host may be lost. Each attempt has fresh nodes, whatever hosts it has: what writers that were killed
have left behind goes with the old ones. Those before are only read, until something newer is in the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.recovery.agents import Report

_MOST_OLDER = 3


@dataclass(frozen=True, slots=True)
class Memory:
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


def at_start(before: Sequence[Memory], members: Mapping[str, Report]) -> tuple[Memory, ...] | None:
    """The memories of an attempt that begins: the first is written to, the others are only read. None: wait for a node that is
    about to be ready.

    before: of the attempt before, likewise. members: what the hosts that take part say.
    """
    if any(report.memory == "coming" for report in members.values()):
        return None
    fresh = sorted((name, report.fresh) for name, report in members.items() if report.memory == "ready")
    if len(fresh) < min(2, len(members)):  # a lone node would not outlive its host, and all would write to it
        fresh = []
    new = Memory(tuple(fresh))
    older = [memory for memory in before if memory.nodes]
    if len(older) > _MOST_OLDER:  # the last has the newest step that is certain; after it none of them may have got that far
        older = [*older[: _MOST_OLDER - 1], older[-1]]
    return (new, *older) if new.nodes or older else ()


def is_newer(memories: Sequence[Memory], reports: Sequence[Report], than: int = -1) -> bool:
    """Whether what is only read holds nothing any more that the first has not newer. than: only what is newer than this step
    counts; those up to it may be spoiled, and older ones needed."""
    return len(memories) > 1 and any(report.saved > than for report in reports)


def named(memories: Sequence[Memory]) -> set[str]:
    """The nodes of all of them."""
    return {at for memory in memories for _, at in memory.nodes}


def facts(memories: Sequence[Memory]) -> list[list[tuple[str, str]]]:
    return [list(memory.nodes) for memory in memories]


def from_facts(told: Sequence[Any]) -> tuple[Memory, ...]:
    return tuple(Memory(tuple((host, at) for host, at in nodes)) for nodes in told)
