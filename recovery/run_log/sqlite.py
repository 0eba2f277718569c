"""The run log in one SQLite file in the folder of the run, for the agents of one host.

The reports of agents are files next to it (report_files.py). A SQLite file of an earlier version also has a table of reports,
which is not used.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckpt.recovery.run_log.agent_name import require_holder
from ckpt.recovery.run_log.base import Draft, LogEntry, RunLog
from ckpt.recovery.run_log.entry_schema import read_row
from ckpt.recovery.run_log.report_files import ReportFiles
from ckpt.storage.base.errors import CkptError, Unavailable
from ckpt.storage.base.file_system_kind import require_local_file_system
from ckpt.storage.base.fsync import make_durable_root
from ckpt.storage.base.sqlite_file import BUSY_SECONDS, open_wal_database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    facts TEXT NOT NULL
);
"""
RUN_LOG_FILE = "run.sqlite"


class SqliteRunLog(RunLog):
    """The log and the reports of the run in a folder. They are created if they do not exist.

    read_only: open an existing log without the permission to write; nothing is created.
    """

    def __init__(self, folder: str | os.PathLike[str], read_only: bool = False) -> None:
        self.path = Path(folder) / RUN_LOG_FILE
        self._needed_access = os.R_OK if read_only else os.W_OK
        self._reports = ReportFiles(self.path.parent)
        try:
            if read_only:
                self._db = self._connect_read_only()
                self._db.text_factory = bytes
                return
            require_local_file_system(
                self.path.parent, "the log of a run", "give a local --run-dir, or --state etcd://HOST:PORT/NAME"
            )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_durable_root(os.path.abspath(folder))  # SQLite makes its files durable, but not their folder
            self._db = open_wal_database(self.path, _SCHEMA)
            self._db.text_factory = bytes  # a text that is damaged so that it is not UTF-8 would fail the whole query
        except sqlite3.Error as error:
            raise CkptError(f"{self.path} can't be used: {error}; {self._remedy(error)}, or give another --run-dir") from error

    def _remedy(self, error: sqlite3.Error) -> str:
        """Return advice for an error. It recommends to remove the file only if the file is not a readable database."""
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return "remove it"
        if name.startswith("SQLITE_READONLY") or (self.path.exists() and not os.access(self.path, self._needed_access)):
            return "this user lacks the permission: run the command as the user of the run"
        return "free space on this disk, and check it"

    def _connect_read_only(self) -> sqlite3.Connection:
        # Without a write-ahead log no process has the file open, and SQLite could not create that log without permission.
        mode = "mode=ro" if Path(f"{self.path}-wal").exists() else "immutable=1"
        uri = f"{self.path.absolute().as_uri()}?{mode}"
        db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            (has_entries,) = db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'entries'").fetchone()
            if not has_entries:
                raise CkptError(f"the run in {self.path.parent} has not begun: check --run-dir")
        except BaseException:
            db.close()  # otherwise the agent that closes last can't remove the write-ahead log
            raise
        return db

    def entries(self, after: int = 0) -> list[LogEntry]:
        query = "SELECT number, at, attempt, kind, text, facts FROM entries WHERE number > ? ORDER BY number"
        with self._translate_errors():
            return [read_row(*row) for row in self._db.execute(query, (after,))]

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        now = time.time()
        rows = [
            (after + 1 + i, now, draft.attempt, draft.kind, _as_utf8(draft.text), json.dumps(draft.facts))
            for i, draft in enumerate(drafts)
        ]
        db = self._db
        with self._translate_errors():
            db.execute("BEGIN IMMEDIATE")
            try:
                (last,) = db.execute("SELECT COALESCE(MAX(number), 0) FROM entries").fetchone()
                if last == after:
                    db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", rows)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            return bool(last == after)

    def reports(self) -> dict[str, dict[str, object]]:
        return self._reports.read()

    def publish_report(self, name: str, facts: Mapping[str, object], replaces: str = "") -> None:
        require_holder(name, self._reports.read_one(name), facts, replaces)
        self._reports.write(name, facts)

    def remove_report(self, name: str, incarnation: str = "") -> None:
        self._reports.remove(name, incarnation)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise Unavailable(f"{self.path} can't be used now: {error}; {self._remedy(error)}") from error


def _as_utf8(text: str) -> str:
    """Return the text with the bytes of paths that are not UTF-8, which Python has as surrogates, as escape sequences."""
    return text.encode("utf-8", "backslashreplace").decode()
