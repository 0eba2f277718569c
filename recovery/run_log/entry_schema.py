"""Reads and checks the entries of the run log, which other processes and other versions have written.

A malformed entry is replaced by a note, whatever wrote it, so that the later entries keep their numbers. The same is done
with an entry of a kind that this version does not know. Fields that a newer version adds are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt.recovery.policy.coordinated_stop import StopRequest
from ckpt.recovery.policy.failure import Failure
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
    """The fields that all entries have."""

    at: float
    attempt: int
    kind: str
    text: str
    facts: Mapping[str, object]

    def __post_init__(self) -> None:
        if not 0 <= self.at <= _LATEST_TIME:
            raise ValueError(f"{self.at} is not a time")


def _facts_check(kind: type[object]) -> Callable[[_EntryFields], object]:
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
"""The check of the facts of each kind. The facts themselves are not converted, because a newer version reads more of them."""


def read_entry(number: int, value: bytes) -> LogEntry:
    """Return the entry in a JSON list of at, attempt, kind, text and facts; a note if it can't be read. Never raises."""
    try:
        row = read_json(value)
        if not isinstance(row, list):
            raise Malformed("it is not a list")
        return _check_entry(
            number, decode(_EntryFields, dict(zip(("at", "attempt", "kind", "text", "facts"), row, strict=False)))
        )
    except Malformed as error:
        return placeholder_entry(number, f"it can't be read: {error}")


def read_row(number: int, at: object, attempt: object, kind: object, text: object, facts: object) -> LogEntry:
    """Return the entry in a row of a table; a note if it can't be read. Never raises.

    kind, text, facts: str, or bytes in UTF-8; facts are JSON.
    """
    try:
        if not isinstance(facts, str | bytes):
            raise Malformed(f"its facts are a {type(facts).__name__}, not JSON")
        fields = {"at": at, "attempt": attempt, "kind": _as_text(kind), "text": _as_text(text), "facts": read_json(facts)}
        return _check_entry(number, decode(_EntryFields, fields))
    except Malformed as error:
        return placeholder_entry(number, f"it can't be read: {error}")


def _as_text(value: object) -> object:
    """Return a value of a table as text if it is bytes. Raises Malformed if they are not UTF-8."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise Malformed(f"{value!r:.60} is not UTF-8") from None


def _check_entry(number: int, fields: _EntryFields) -> LogEntry:
    check = _FACTS_CHECKS.get(fields.kind)
    if check is None:
        return placeholder_entry(number, f"its kind {fields.kind[:40]!r} is unknown; a newer version may have written it")
    check(fields)
    return LogEntry(number, fields.at, fields.attempt, fields.kind, fields.text, dict(fields.facts))
