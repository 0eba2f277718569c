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
class LogEntry:
    """One line of the log."""

    number: int
    at: float
    """Seconds since 1970, by the clock of who wrote it. For people: nothing is decided by it."""
    attempt: int
    kind: str
    text: str
    facts: dict[str, Any]


class RunLog(ABC):
    """An engine. Calls raise Unavailable where it does not answer now; what is written is durable when a call returns."""

    is_remote = False
    """Whether it can be reached from other hosts: a lock in the folder of the run keeps nobody off it."""

    @abstractmethod
    def entries(self, after: int = 0) -> list[LogEntry]:
        """Those with a higher number, in order."""

    @abstractmethod
    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        """Add entries behind number `after`, all or none; False where it is not the last one any more."""

    @abstractmethod
    def reports(self) -> dict[str, dict[str, Any]]:
        """What each agent said last, by name."""

    @abstractmethod
    def publish_report(self, name: str, facts: Mapping[str, Any]) -> None:
        """Say it of an agent. Need not be durable."""

    @abstractmethod
    def remove_report(self, name: str) -> None:
        """The agent is no more."""

    def endpoints(self) -> list[tuple[str, int]]:
        """Host and port of all servers that keep it; none where it is a file."""
        return []

    @abstractmethod
    def close(self) -> None: ...


def placeholder_entry(number: int, why: str) -> LogEntry:
    """What stands in place of an entry that nothing may depend on: a note. It is logged, too."""
    text = f"entry {number} of the log of the run is passed over: {why}"
    log.warning("%s", text)
    return LogEntry(number, 0.0, 0, "note", text, {})


def entry_to_json(entry: LogEntry) -> str:
    """One line."""
    return json.dumps(asdict(entry))


def open_run_log(folder: Path, url: str | None = None, read_only: bool = False) -> RunLog:
    """The state of the run in a folder, or at etcd://HOST:PORT,…/NAME. read_only: for who only asks.

    In etcd entries are signed with the token that the environment names.
    """
    if url is None:
        from ckpt.recovery.run_log.sqlite import SqliteRunLog

        return SqliteRunLog(folder, read_only)
    from ckpt.aggregator.cluster.config import token_from_environment
    from ckpt.recovery.run_log.etcd import EtcdRunLog

    return EtcdRunLog(url, token_from_environment(), read_only)
