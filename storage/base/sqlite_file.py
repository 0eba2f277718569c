"""Opens SQLite files with a write-ahead log, also where several processes create one at once."""

from __future__ import annotations

import os
import sqlite3
import time

BUSY_SECONDS = 30.0
"""Seconds that a call to a database waits for the transaction of another process."""
_RETRY_SECONDS = 0.05


def open_wal_database(path: str | os.PathLike[str], schema: str) -> sqlite3.Connection:
    """Return a connection to a SQLite file whose transactions are durable. The file is created if it does not exist.

    schema: SQL that creates the tables that do not exist. The connection begins no transaction by itself, and any thread may
    use it.

    Raises:
        sqlite3.Error: The file can't be used, or others keep it locked for `BUSY_SECONDS`.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise sqlite3.OperationalError(f"no write-ahead log is possible here (journal mode {mode})")
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(schema)
            return db
        except sqlite3.Error as error:
            db.close()
            # SQLite's timeout does not cover the switch to a write-ahead log when several connections open a new file at once.
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(_RETRY_SECONDS)
        except BaseException:
            db.close()
            raise
