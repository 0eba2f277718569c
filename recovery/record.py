"""What happened to a job and what was decided, for ever: one SQLite file in the folder of the run.

A decision is committed before it is acted upon, with its reason in words; `ckpt-run why` prints them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.storage.errors import CkptError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL,
    text TEXT NOT NULL, facts TEXT NOT NULL
)
"""
FILE = "run.sqlite"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the record."""

    number: int
    at: float
    """Seconds since 1970."""
    attempt: int
    kind: str
    """start, running, failure, decision, end."""
    text: str
    facts: dict[str, Any]


class Record:
    """The record in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(_SCHEMA)
        except sqlite3.Error as error:
            raise CkptError(f"{self.path} can't be used: {error}; remove it, or give another --run-dir") from error

    def add(self, attempt: int, kind: str, text: str, **facts: Any) -> None:
        """Durable when it returns."""
        self._db.execute(
            "INSERT INTO entries (at, attempt, kind, text, facts) VALUES (?, ?, ?, ?, ?)",
            (time.time(), attempt, kind, text, json.dumps(facts)),
        )

    def entries(self, kinds: Sequence[str] = ()) -> list[Entry]:
        """All, or those of some kinds, in order."""
        rows = self._db.execute("SELECT number, at, attempt, kind, text, facts FROM entries ORDER BY number")
        found = [
            Entry(number, at, attempt, kind, text, json.loads(facts)) for number, at, attempt, kind, text, facts in rows
        ]
        return [entry for entry in found if not kinds or entry.kind in kinds]

    def close(self) -> None:
        self._db.close()


def as_json(entry: Entry) -> str:
    """One line."""
    return json.dumps(asdict(entry))
