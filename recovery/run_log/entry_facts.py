"""What the entries of the log of a run hold, by their kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ckpt.recovery.policy.decide import Failure
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.storage.base.checked_decode import decode

F = TypeVar("F")

_MemoryNodeLists = tuple[tuple[tuple[str, str], ...], ...]
"""Of each memory, host and HOST:PORT of its nodes."""

_MOST_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class CutOffAttempt:
    """An attempt whose agents ended before one of them wrote how it ended: the newest that they reported."""

    committed: int
    line: int = 0
    restored: int = -1
    durable: int = -1
    step_seconds: float = 0.0

    def as_failure(self) -> Failure:
        return Failure(
            "lost", (), "", -1, self.committed, 0.0, restored=self.restored, durable=self.durable,
            step_seconds=self.step_seconds, line=self.line,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFacts:
    run: str
    spec: RunSpec
    cut_off: CutOffAttempt | None = None
    """The attempt before, where the log has no end of it."""

    def __post_init__(self) -> None:
        if not self.spec.command or not 0 < self.spec.ranks <= _MOST_RANKS or not 0 < self.spec.hosts <= _MOST_RANKS:
            raise ValueError(f"{self.spec.ranks} ranks on {self.spec.hosts} hosts of {self.spec.command} are no run")


@dataclass(frozen=True, slots=True)
class LeadFacts:
    name: str


@dataclass(frozen=True, slots=True)
class StartFacts:
    ranks: int
    members: tuple[AttemptHost, ...]
    address: str
    port: int
    memory: _MemoryNodeLists = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Checked by rank_environment.py."""
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        first = 0
        for member in self.members:
            if member.first != first or member.count < 1:
                raise ValueError(f"{member.name} has {member.count} ranks from {member.first} on, where {first} is the next")
            first += member.count
        if not self.members or first != self.ranks or self.ranks > _MOST_RANKS:
            raise ValueError(f"its members have {first} of {self.ranks} ranks")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"{self.port} is no port")


@dataclass(frozen=True, slots=True)
class FailureSummary:
    """What people are shown of a failure; `failure_of` has all of it."""

    cause: str
    ranks: tuple[int, ...] = ()
    host: str = ""


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    action: Literal["restart", "halt"]
    status: int | None = None
    wait: float = 0.0
    before: int | None = None
    limit: float | None = None
    skip: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.action == "halt" and self.status is None:
            raise ValueError("it ends the run without a status")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    memory: _MemoryNodeLists


@dataclass(frozen=True, slots=True)
class NoteFacts:
    """What a note says; None: nothing of that."""

    straggler: int | None = None
    """The rank."""
    host: str | None = None
    """Where it is."""
    times: float | None = None
    """As slow as the median."""
    seconds: float | None = None
    left_out: str | None = None
    spares: int | None = None
    came: int | None = None
    restored: int | None = None
    awaited: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.straggler is not None and (self.host is None or self.times is None):
            raise ValueError("it names a straggler, and not its host")


@dataclass(frozen=True, slots=True)
class EndFacts:
    status: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class NoFacts:
    pass


def facts_of(entry: LogEntry, facts_type: type[F]) -> F:
    """The facts of an entry, as fields. What a newer version adds is not among them. Raises Malformed."""
    return decode(facts_type, entry.facts)


def failure_of(entry: LogEntry) -> Failure:
    """Of an entry of that kind. Raises Malformed."""
    return decode(Failure, {**entry.facts, "detail": entry.text})


def memories_of(entry: LogEntry) -> tuple[MemoryNamespace, ...]:
    """The memories that are in use from this entry on; none where it says nothing of them."""
    facts_type = {"start": StartFacts, "memory": MemoryFacts}.get(entry.kind)
    return () if facts_type is None else memory_placement.from_facts(facts_of(entry, facts_type).memory)
