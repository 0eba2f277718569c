"""The facts of the entries of the run log: one frozen dataclass for each kind of entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ckpt.groups.launchers import MAX_RANKS
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.run_log import memory_placement
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.memory_placement import MemoryNamespace
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.storage.base.checked_decode import decode
from ckpt.storage.node.client_credentials import MAX_PORT

F = TypeVar("F")

_MemoryNodeLists = tuple[tuple[tuple[str, str], ...], ...]
"""For each memory namespace, host and HOST:PORT of its nodes."""


@dataclass(frozen=True, slots=True)
class CutOffAttempt:
    """An attempt whose agents ended before one of them wrote its end. The values are the newest that they reported."""

    committed: int
    line: int = 0
    restored: int = -1
    durable: int = -1
    step_seconds: float = 0.0

    def as_failure(self) -> Failure:
        """Return the failure that ended the attempt, without what nobody has recorded: its step, its time and its host."""
        return Failure(
            "lost", (), "", -1, self.committed, 0.0, restored=self.restored, durable=self.durable,
            step_seconds=self.step_seconds, line=self.line,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of the entry that begins a run: its name and what it runs."""

    run: str
    spec: RunSpec
    cut_off: CutOffAttempt | None = None
    """The attempt before, if the log does not contain its end."""

    def __post_init__(self) -> None:
        if not self.spec.command or not 0 < self.spec.ranks <= MAX_RANKS or not 0 < self.spec.hosts <= MAX_RANKS:
            raise ValueError(f"{self.spec.command} on {self.spec.hosts} hosts with {self.spec.ranks} ranks each is not a run")


@dataclass(frozen=True, slots=True)
class LeadFacts:
    """The facts of an entry that names the leading agent."""

    name: str


@dataclass(frozen=True, slots=True)
class StartFacts:
    """The facts of the start of an attempt: its hosts, and where rank 0 listens."""

    ranks: int
    members: tuple[AttemptHost, ...]
    address: str
    port: int
    memory: _MemoryNodeLists = ()
    environment: Mapping[str, object] = field(default_factory=dict)
    """Checked by allowed_variables.py."""
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        first = 0
        for host in self.members:
            if host.first != first or host.count < 1:
                raise ValueError(f"{host.name} has {host.count} ranks from {host.first} on, but the next rank is {first}")
            first += host.count
        if not self.members or first != self.ranks or self.ranks > MAX_RANKS:
            raise ValueError(f"its members have {first} of {self.ranks} ranks")
        if not 0 < self.port <= MAX_PORT:
            raise ValueError(f"{self.port} is not a port")


@dataclass(frozen=True, slots=True)
class FailureSummary:
    """The part of a failure that is shown to people. `failure_of` returns all of it."""

    cause: str
    ranks: tuple[int, ...] = ()
    host: str = ""


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """The facts of a decision after a failure."""

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
    """The facts of an entry about the memory namespaces, each with its nodes."""

    memory: _MemoryNodeLists


@dataclass(frozen=True, slots=True)
class NoteFacts:
    """The facts of a note. Each is None if the note is about something else."""

    straggler: int | None = None
    """The rank of a straggler."""
    host: str | None = None
    """The host of the straggler."""
    times: float | None = None
    """How many times as long as the median it takes."""
    seconds: float | None = None
    """How long a step of it takes."""
    left_out: str | None = None
    """The host that is left out of the next attempt."""
    spares: int | None = None
    """The number of spare hosts that wait."""
    came: int | None = None
    """The number of hosts that have arrived while the run waits for more."""
    restored: int | None = None
    """The step that the attempt resumed from, if it is older than expected."""
    awaited: tuple[str, ...] | None = None
    """The silent hosts that the run waits for."""

    def __post_init__(self) -> None:
        if self.straggler is not None and (self.host is None or self.times is None):
            raise ValueError("it names a straggler, but not its host or how slow it is")


@dataclass(frozen=True, slots=True)
class EndFacts:
    """The facts of the end of a run: the exit status of `ckpt-run`, and whether the run ended by itself."""

    status: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class NoFacts:
    """The facts of an entry that has none."""


def facts_of(entry: LogEntry, facts_type: type[F]) -> F:
    """Return the facts of an entry as a dataclass. Fields that a newer version adds are ignored. Raises Malformed."""
    return decode(facts_type, entry.facts)


def failure_of(entry: LogEntry) -> Failure:
    """Return the failure of an entry of that kind. Raises Malformed."""
    return decode(Failure, {**entry.facts, "detail": entry.text})


def memories_of(entry: LogEntry) -> tuple[MemoryNamespace, ...]:
    """Return the memory namespaces in use from this entry on; none for kinds of entries that do not list them."""
    facts_type = {"start": StartFacts, "memory": MemoryFacts}.get(entry.kind)
    return () if facts_type is None else memory_placement.from_facts(facts_of(entry, facts_type).memory)
