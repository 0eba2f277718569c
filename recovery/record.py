"""The state of a run in one SQLite file in its folder, for the agents of one host."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt.recovery.state import Draft, Entry, State
from ckpt.storage.errors import CkptError, Unavailable

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    facts TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS agents (name TEXT PRIMARY KEY, facts TEXT NOT NULL);
"""
_BUSY_SECONDS = 30.0
FILE = "run.sqlite"


class Record(State):
    """The file in a folder, made where it is not there. read_only: by who may not write there; nothing is made then."""

    def __init__(self, folder: str | os.PathLike[str], read_only: bool = False) -> None:
        self.path = Path(folder) / FILE
        self._needs = os.R_OK if read_only else os.W_OK
        self._lock = threading.Lock()  # a thread of its own says that the agent lives
        try:
            if read_only:
                self._db, self._reports = self._connect_to_read(), self._connect_to_read()
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._connect("FULL")
            self._reports = self._connect("OFF")  # what an agent says now is of no use after a crash
        except sqlite3.Error as error:
            raise CkptError(f"{self.path} can't be used: {error}; {self._remedy(error)}, or give another --run-dir") from error

    def _remedy(self, error: sqlite3.Error) -> str:
        """What to do; nobody is told to remove what may well be the record of a run."""
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return "remove it"
        if name.startswith("SQLITE_READONLY") or (self.path.exists() and not os.access(self.path, self._needs)):
            return "this user lacks the permission: do it as the user of the run"
        return "free space on this disk, and check it"

    def _connect_to_read(self) -> sqlite3.Connection:
        # Nobody has it open where it has no log beside it, and who may not write there could not make one.
        how = "mode=ro" if Path(f"{self.path}-wal").exists() else "immutable=1"
        where = f"{self.path.absolute().as_uri()}?{how}"
        db = sqlite3.connect(where, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        (made,) = db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'agents'").fetchone()
        if not made:
            raise CkptError(f"the run in {self.path.parent} has not begun")
        return db

    def _connect(self, synchronous: str) -> sqlite3.Connection:
        until = time.monotonic() + _BUSY_SECONDS
        while True:
            db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute(f"PRAGMA synchronous = {synchronous}")
                db.executescript(_SCHEMA)
                return db
            except sqlite3.Error as error:
                db.close()
                # Where several agents open a new file at once SQLite does not wait by itself for who makes the log.
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def entries(self, after: int = 0) -> list[Entry]:
        query = "SELECT number, at, attempt, kind, text, facts FROM entries WHERE number > ? ORDER BY number"
        with self._told():
            return [
                Entry(number, at, attempt, kind, text, json.loads(facts))
                for number, at, attempt, kind, text, facts in self._db.execute(query, (after,))
            ]

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        now = time.time()
        rows = [
            (after + 1 + i, now, draft.attempt, draft.kind, draft.text, json.dumps(draft.facts))
            for i, draft in enumerate(drafts)
        ]
        db = self._db
        with self._told():
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

    def reports(self) -> dict[str, dict[str, Any]]:
        with self._lock, self._told():
            return {name: json.loads(facts) for name, facts in self._reports.execute("SELECT name, facts FROM agents")}

    def report(self, name: str, facts: Mapping[str, Any]) -> None:
        with self._lock, self._told():
            self._reports.execute("INSERT OR REPLACE INTO agents VALUES (?, ?)", (name, json.dumps(facts)))

    def withdraw(self, name: str) -> None:
        with self._lock, self._told():
            self._reports.execute("DELETE FROM agents WHERE name = ?", (name,))

    def close(self) -> None:
        self._db.close()
        with self._lock:
            self._reports.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise Unavailable(f"{self.path} can't be used now: {error}; {self._remedy(error)}") from error
