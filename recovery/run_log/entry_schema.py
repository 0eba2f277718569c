"""What the entries of the log of a run must hold, by their kind, and how one is read that somebody else wrote.

An entry that does not hold it is passed over, whatever wrote it: a note stands in its place, so that it keeps its number. So
does one of a kind that this version does not know. What a newer version adds to an entry is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.policy.decide import Failure
from ckpt.recovery.run_log.base import LogEntry, placeholder_entry
from ckpt.recovery.run_log.run_state import AttemptHost, RunSpec
from ckpt.storage.base.checked_decode import Malformed, decode, read_json

_MemoryNodeLists = tuple[tuple[tuple[str, str], ...], ...]
"""Of each memory, host and HOST:PORT of its nodes."""

_MOST_RANKS = 1 << 24
_LATEST_TIME = 253_402_300_799.0
"""The last second of the year 9999."""


@dataclass(frozen=True, slots=True)
class _EntryFields:
    """What all entries have."""

    at: float
    attempt: int
    kind: str
    text: str
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.at <= _LATEST_TIME:
            raise ValueError(f"{self.at} is no time")


@dataclass(frozen=True, slots=True)
class _RunFacts:
    run: str
    spec: RunSpec
    cut_off: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.spec.command or not 0 < self.spec.ranks <= _MOST_RANKS or not 0 < self.spec.hosts <= _MOST_RANKS:
            raise ValueError(f"{self.spec.ranks} ranks on {self.spec.hosts} hosts of {self.spec.command} are no run")


@dataclass(frozen=True, slots=True)
class _LeadFacts:
    name: str


@dataclass(frozen=True, slots=True)
class _StartFacts:
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
class _DecisionFacts:
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
class _MemoryFacts:
    memory: _MemoryNodeLists


@dataclass(frozen=True, slots=True)
class _NoteFacts:
    straggler: int | None = None
    host: str | None = None
    times: float | None = None
    left_out: str = ""
    spares: int = 0
    came: int = 0
    restored: int = 0
    awaited: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.straggler is not None and (self.host is None or self.times is None):
            raise ValueError("it names a straggler, and not its host")


@dataclass(frozen=True, slots=True)
class _EndFacts:
    status: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class _NoFacts:
    pass


def _facts_check(kind: type[Any]) -> Callable[[_EntryFields], object]:
    return lambda line: decode(kind, line.facts)


_FACTS_CHECKS: Mapping[str, Callable[[_EntryFields], object]] = {
    "run": _facts_check(_RunFacts),
    "lead": _facts_check(_LeadFacts),
    "start": _facts_check(_StartFacts),
    "request": _facts_check(_NoFacts),
    "stop": _facts_check(StopRequest),
    "failure": lambda line: decode(Failure, {**line.facts, "detail": line.text}),
    "decision": _facts_check(_DecisionFacts),
    "memory": _facts_check(_MemoryFacts),
    "note": _facts_check(_NoteFacts),
    "end": _facts_check(_EndFacts),
}
"""How the facts of each kind are checked. They stay as they are: a newer version reads more of them."""


def read_entry(number: int, value: bytes) -> LogEntry:
    """The entry of a JSON list: at, attempt, kind, text, facts. Never raises: a note stands for what is not readable."""
    try:
        row = read_json(value)
        if not isinstance(row, list):
            raise Malformed("is no list")
        return _check_entry(
            number, decode(_EntryFields, dict(zip(("at", "attempt", "kind", "text", "facts"), row, strict=False)))
        )
    except Malformed as error:
        return placeholder_entry(number, f"it can't be read: {error}")


def read_row(number: int, at: object, attempt: object, kind: object, text: object, facts: object) -> LogEntry:
    """The entry of a row of a table, whose facts are JSON. Never raises, likewise."""
    try:
        if not isinstance(facts, str | bytes):
            raise Malformed(f"its facts are a {type(facts).__name__}, not JSON")
        fields = {"at": at, "attempt": attempt, "kind": kind, "text": text, "facts": read_json(facts)}
        return _check_entry(number, decode(_EntryFields, fields))
    except Malformed as error:
        return placeholder_entry(number, f"it can't be read: {error}")


def _check_entry(number: int, fields: _EntryFields) -> LogEntry:
    check = _FACTS_CHECKS.get(fields.kind)
    if check is None:
        return placeholder_entry(number, f"its kind {fields.kind[:40]!r} is unknown; a newer version may have written it")
    check(fields)
    return LogEntry(number, fields.at, fields.attempt, fields.kind, fields.text, dict(fields.facts))
