"""Hosts, faults and attempts of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt.recovery.run_log.agent_reports import HostFailure
from ckpt.recovery.run_log.memory_placement import MemoryNamespace

Nodes = tuple[tuple[str, str], ...]
"""The nodes of a namespace: host and HOST:PORT of each."""


def host_of(actor: str) -> str:
    """Return the host of an agent: the first word of the name of its actor. A later agent of a host has more words."""
    return actor.partition(" ")[0]


@dataclass(slots=True)
class Host:
    """What is true of one host, whatever others know of it."""

    name: str
    agent: str = ""
    """The actor that is its agent now; "" none."""
    silent_since: float | None = 0.0
    """When its agent ended, or when it was stopped or cut off; None if neither."""
    returned_at: float = 0.0
    """When it was last stopped, cut off, or without an agent."""
    stopped_until: float = 0.0
    cut_until: float = 0.0
    memory: set[str] = field(default_factory=set)
    """HOST:PORT of the nodes whose data exists."""
    served: set[str] = field(default_factory=set)
    """HOST:PORT of those that answer while the host is reachable."""
    ranks_of: int | None = None
    """The attempt of the ranks that run there; None if there are none."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """Something that happens to a host, or to the run log, at a time."""

    at: float
    kind: str
    hosts: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class Training:
    """The ranks of one attempt."""

    attempt: int
    members: tuple[str, ...]
    memory: tuple[MemoryNamespace, ...]
    awaited: str
    """Seconds and URL of the memory for which the ranks wait; "" for none."""
    at: float
    """When they make their next step, or restore."""
    restored: int | None = None
    step: int = -1
    saved: int = -1
    is_over: bool = False
    failed: dict[str, HostFailure] = field(default_factory=dict)
    stalled_since: float | None = None
    copies: list[tuple[float, int]] = field(default_factory=list)
    """When which step will be in the repository."""
