"""`RunLog`, the interface to what all hosts of a run share: an append-only log, and one report for each agent.

All agents follow the entries of the log. The entries are numbered, and each number is written once. If two agents both lead
for a moment, the append of one of them fails, and it reads what the other has written. There are two implementations: SQLite
in the folder of the run (sqlite.py) for the agents of one host, and etcd (etcd.py) for those of many hosts.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckpt.storage.base.errors import InvalidArgument

log = logging.getLogger("ckpt.run")


def require_state_url(url: str) -> None:
    """Raise InvalidArgument if this is not the URL of a run log in etcd, as --state gives it."""
    if not re.fullmatch(r"etcd://[^/]+/[\w.-]+", url):
        raise InvalidArgument(f"--state {url}: write etcd://HOST:PORT,…/NAME; without it the log is a file in --run-dir")


@dataclass(frozen=True, slots=True)
class Draft:
    """An entry that is not yet appended."""

    attempt: int
    kind: str
    """run, lead, start, request, stop, failure, decision, memory, end, note. Notes are for people."""
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the log."""

    number: int
    at: float
    """Seconds since 1970, by the clock of the writer. It is for people; no decision depends on it."""
    attempt: int
    kind: str
    text: str
    facts: dict[str, object]


class RunLog(ABC):
    """The log and the reports of one run. Calls raise Unavailable if the storage does not answer.

    Entries are durable when `append` returns. The main thread of an agent reads and appends. The thread that publishes reports
    calls only `publish_report` and `endpoints`, and the thread of the host lease only `endpoints`.
    """

    is_remote = False
    """Whether other hosts can reach it. If so, a lock file in the folder of the run does not exclude them."""
    own_options = "its own --run-dir"
    """What a message advises to give to each of two jobs, so that they share no log and no ledger."""

    @abstractmethod
    def entries(self, after: int = 0) -> list[LogEntry]:
        """Return the entries with a number above `after`, in order."""

    @abstractmethod
    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        """Append entries after the number `after`: all or none. Return False if `after` is no longer the last number."""

    @abstractmethod
    def reports(self) -> dict[str, dict[str, object]]:
        """Return the newest report of each agent, by its name."""

    @abstractmethod
    def publish_report(self, name: str, facts: Mapping[str, object], replaces: str = "") -> None:
        """Replace the report of an agent. It need not be durable.

        replaces: the lost agent of this name whose report may be replaced, by its `incarnation`; "" none.

        Raises NameTaken if the existing report belongs to another agent.
        """

    @abstractmethod
    def remove_report(self, name: str, incarnation: str = "") -> None:
        """Remove the report of an agent that has ended.

        incarnation: remove the report only if it belongs to this agent; "" removes any.
        """

    def compact(self, now: float) -> None:  # noqa: B027
        """Let the storage free what newer reports have replaced. The leader calls it often; mostly nothing is due.

        It never raises Unavailable. now: the time by CLOCK_MONOTONIC.
        """

    def endpoints(self) -> list[tuple[str, int]]:
        """Return host and port of all servers that store the log; none if it is a file."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the file or the connections. The log and the reports stay."""


def placeholder_entry(number: int, why: str) -> LogEntry:
    """Return a note that replaces an unreadable entry, so that the later entries keep their numbers. It is logged, too."""
    text = f"entry {number} of the log of the run is skipped: {why}"
    log.warning("%s", text)
    return LogEntry(number, 0.0, 0, "note", text, {})


def entry_to_json(entry: LogEntry) -> str:
    """Return the entry as one line of JSON."""
    return json.dumps(asdict(entry))


def open_run_log(folder: Path, url: str | None = None, read_only: bool = False) -> RunLog:
    """Open the log of the run in a folder, or at `url` = etcd://HOST:PORT,…/NAME.

    Entries in etcd are signed with the token that the environment names.

    read_only: for queries; nothing is created or written.
    """
    if url is None:
        from ckpt.recovery.run_log.sqlite import SqliteRunLog

        return SqliteRunLog(folder, read_only)
    from ckpt.aggregator.cluster.config import token_from_environment
    from ckpt.recovery.run_log.etcd import EtcdRunLog

    return EtcdRunLog(url, token_from_environment(), read_only)
