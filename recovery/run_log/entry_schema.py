"""What the entries of the log of a run must hold, by their kind, and how one is read that somebody else wrote.

An entry that does not hold it is passed over, whatever wrote it: a note stands in its place, so that it keeps its number. So
does one of a kind that this version does not know. What a newer version adds to an entry is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.policy.decide import Failure
from ckpt.recovery.run_log.base import LogEntry, placeholder_entry
from ckpt.recovery.run_log.entry_facts import (
    DecisionFacts,
    EndFacts,
    LeadFacts,
    MemoryFacts,
    NoFacts,
    NoteFacts,
    RunFacts,
    StartFacts,
)
from ckpt.storage.base.checked_decode import Malformed, decode, read_json

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


def _facts_check(kind: type[Any]) -> Callable[[_EntryFields], object]:
    return lambda line: decode(kind, line.facts)


_FACTS_CHECKS: Mapping[str, Callable[[_EntryFields], object]] = {
    "run": _facts_check(RunFacts),
    "lead": _facts_check(LeadFacts),
    "start": _facts_check(StartFacts),
    "request": _facts_check(NoFacts),
    "stop": _facts_check(StopRequest),
    "failure": lambda line: decode(Failure, {**line.facts, "detail": line.text}),
    "decision": _facts_check(DecisionFacts),
    "memory": _facts_check(MemoryFacts),
    "note": _facts_check(NoteFacts),
    "end": _facts_check(EndFacts),
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
