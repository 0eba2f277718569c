"""What is known of a run to all of its hosts: a log that only grows, and what each agent says of itself now.

The log decides. Its entries have numbers, and a number is given once: of two who take themselves for the coordinator, one is
told that it came too late, and reads what the other has written. Two engines: SQLite in the folder of the run (record.py),
for the agents of one host; etcd (etcd_state.py), for those of many.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("ckpt.run")


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to become an entry."""

    attempt: int
    kind: str
    """run, lead, start, request, stop, failure, decision, memory, end; note: only to be read."""
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log."""

    number: int
    at: float
    """Seconds since 1970, by the clock of who wrote it. For people: nothing is decided by it."""
    attempt: int
    kind: str
    text: str
    facts: dict[str, Any]


class State(ABC):
    """An engine. Calls raise Unavailable where it does not answer now; what is written is durable when a call returns."""

    remote = False
    """Whether it can be reached from other hosts: a lock in the folder of the run keeps nobody off it."""

    @abstractmethod
    def entries(self, after: int = 0) -> list[Entry]:
        """Those with a higher number, in order."""

    @abstractmethod
    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        """Add entries behind number `after`, all or none; False where it is not the last one any more."""

    @abstractmethod
    def reports(self) -> dict[str, dict[str, Any]]:
        """What each agent said last, by name."""

    @abstractmethod
    def report(self, name: str, facts: Mapping[str, Any]) -> None:
        """Say it of an agent. Need not be durable."""

    @abstractmethod
    def withdraw(self, name: str) -> None:
        """The agent is no more."""

    def endpoints(self) -> list[tuple[str, int]]:
        """Host and port of all servers that keep it; none where it is a file."""
        return []

    @abstractmethod
    def close(self) -> None: ...


def passed_over(number: int, why: str) -> Entry:
    """What stands in place of an entry that nothing may depend on: a note. It is logged, too."""
    text = f"entry {number} of the log of the run is passed over: {why}"
    log.warning("%s", text)
    return Entry(number, 0.0, 0, "note", text, {})


def as_json(entry: Entry) -> str:
    """One line."""
    return json.dumps(asdict(entry))


def open_state(folder: Path, url: str | None = None, read_only: bool = False) -> State:
    """The state of the run in a folder, or at etcd://HOST:PORT,…/NAME. read_only: for who only asks.

    In etcd entries are signed with the token that the environment names.
    """
    if url is None:
        from ckpt.recovery.record import Record

        return Record(folder, read_only)
    from ckpt.aggregator.members import token_told
    from ckpt.recovery.etcd_state import EtcdState

    return EtcdState(url, token_told(), read_only)
