"""What the entries of the log of a run must hold, by their kind, and how one is read that somebody else wrote.

An entry that does not hold it is passed over, whatever wrote it: a note stands in its place, so that it keeps its number. So
does one of a kind that this version does not know. What a newer version adds to an entry is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.recovery.course import Member, Spec
from ckpt.recovery.decide import Failure
from ckpt.recovery.state import Entry, passed_over
from ckpt.recovery.stopping import Stop
from ckpt.storage.decode import Malformed, decode, read_json

_Memories = tuple[tuple[tuple[str, str], ...], ...]
"""Of each memory, host and HOST:PORT of its nodes."""

_MOST_RANKS = 1 << 24
_LATEST = 253_402_300_799.0
"""The last second of the year 9999."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What all entries have."""

    at: float
    attempt: int
    kind: str
    text: str
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.at <= _LATEST:
            raise ValueError(f"{self.at} is no time")


@dataclass(frozen=True, slots=True)
class _Run:
    run: str
    spec: Spec
    cut_off: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.spec.command or not 0 < self.spec.ranks <= _MOST_RANKS or not 0 < self.spec.hosts <= _MOST_RANKS:
            raise ValueError(f"{self.spec.ranks} ranks on {self.spec.hosts} hosts of {self.spec.command} are no run")


@dataclass(frozen=True, slots=True)
class _Lead:
    name: str


@dataclass(frozen=True, slots=True)
class _Start:
    ranks: int
    members: tuple[Member, ...]
    address: str
    port: int
    memory: _Memories = ()
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
class _Decision:
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
class _Memory:
    memory: _Memories


@dataclass(frozen=True, slots=True)
class _Note:
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
class _End:
    status: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class _Nothing:
    pass


def _of(kind: type[Any]) -> Callable[[_Line], object]:
    return lambda line: decode(kind, line.facts)


_FACTS: Mapping[str, Callable[[_Line], object]] = {
    "run": _of(_Run), "lead": _of(_Lead), "start": _of(_Start), "request": _of(_Nothing), "stop": _of(Stop),
    "failure": lambda line: decode(Failure, {**line.facts, "detail": line.text}), "decision": _of(_Decision),
    "memory": _of(_Memory), "note": _of(_Note), "end": _of(_End),
}  # fmt: skip
"""How the facts of each kind are checked. They stay as they are: a newer version reads more of them."""


def read_entry(number: int, value: bytes) -> Entry:
    """The entry of a JSON list: at, attempt, kind, text, facts. Never raises: a note stands for what is not readable."""
    try:
        row = read_json(value)
        if not isinstance(row, list):
            raise Malformed("is no list")
        return _checked(number, decode(_Line, dict(zip(("at", "attempt", "kind", "text", "facts"), row, strict=False))))
    except Malformed as error:
        return passed_over(number, f"it can't be read: {error}")


def read_row(number: int, at: object, attempt: object, kind: object, text: object, facts: object) -> Entry:
    """The entry of a row of a table, whose facts are JSON. Never raises, likewise."""
    try:
        if not isinstance(facts, str | bytes):
            raise Malformed(f"its facts are a {type(facts).__name__}, not JSON")
        told = {"at": at, "attempt": attempt, "kind": kind, "text": text, "facts": read_json(facts)}
        return _checked(number, decode(_Line, told))
    except Malformed as error:
        return passed_over(number, f"it can't be read: {error}")


def _checked(number: int, line: _Line) -> Entry:
    check = _FACTS.get(line.kind)
    if check is None:
        return passed_over(number, f"its kind {line.kind[:40]!r} is unknown; a newer version may have written it")
    check(line)
    return Entry(number, line.at, line.attempt, line.kind, line.text, dict(line.facts))
