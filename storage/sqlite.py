"""Registers in one SQLite file: thousands of small changes a second with one fsync a batch, and listings by index.

For a local file system: the write-ahead log is shared through memory by the processes of one host.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ckpt.storage.errors import StoreError
from ckpt.storage.failpoints import failpoint
from ckpt.storage.registers import (
    BODY_BYTES,
    NONE,
    Answer,
    Ballot,
    Change,
    Damaged,
    Record,
    Registers,
    Value,
    checksum,
    decode_ballot,
    encode_ballot,
    taken,
)

_BUSY_SECONDS = 30.0
"""How long a call waits for another process's batch."""

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS registers (
    name TEXT PRIMARY KEY, promised BLOB NOT NULL, accepted BLOB NOT NULL, sum INTEGER NOT NULL, head BLOB, body BLOB
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value)
"""

_READ = "SELECT promised, accepted, sum, head, body FROM registers WHERE name = ?"
_WRITE = "INSERT OR REPLACE INTO registers (name, promised, accepted, sum, head, body) VALUES (?, ?, ?, ?, ?, ?)"


class SqliteRegisters(Registers):
    """The registers in the file at `path`, which is made when first written to."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = os.getpid()

    def read(self, names: Sequence[str]) -> list[Answer]:
        if not self._exists():
            return [Record()] * len(names)
        with self._using("reading") as db:
            return [_get(db, name) for name in names]

    def prepare(self, names: Sequence[str], ballot: Ballot) -> list[Answer]:
        def promise(db: sqlite3.Connection) -> list[Answer]:
            answers: list[Answer] = []
            for name in names:
                record = _get(db, name)
                if isinstance(record, Record) and record.promised < ballot:
                    record = Record(ballot, record.accepted, record.value)
                    _put(db, name, record)
                answers.append(record)
            return answers

        return self._writing(promise)

    def accept(self, values: Sequence[tuple[str, Value]], ballot: Ballot, heal: bool = False) -> list[bool]:
        def take(db: sqlite3.Connection) -> list[bool]:
            answers = []
            for name, value in values:
                record = _get(db, name)
                good = heal if isinstance(record, Damaged) else record.promised <= ballot
                if good:
                    _put(db, name, Record(ballot, ballot, value))
                answers.append(good)
            return answers

        return self._writing(take)

    def change(self, changes: Sequence[Change], writer: str) -> list[bool]:
        def take(db: sqlite3.Connection) -> list[bool]:
            answers = []
            for change in changes:
                record = _get(db, change.name)
                good = isinstance(record, Record) and taken(record, change)
                if good:
                    ballot = change.expected.next_step(writer)
                    _put(db, change.name, Record(ballot, ballot, change.value))
                answers.append(good)
            return answers

        return self._writing(take)

    def start_anew(self) -> None:
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None
            aside = f"{self._path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
            for end in ("", "-wal", "-shm"):
                if os.path.exists(self._path + end):
                    os.replace(self._path + end, aside + end)
        self._writing(lambda db: db.execute("INSERT OR REPLACE INTO facts VALUES ('incomplete', 1)"))

    def complete(self) -> None:
        self._writing(lambda db: db.execute("DELETE FROM facts WHERE name = 'incomplete'"))

    def forget(self, names: Sequence[tuple[str, Ballot]]) -> None:
        def remove(db: sqlite3.Connection) -> None:
            db.executemany(
                "DELETE FROM registers WHERE name = ? AND accepted = ? AND promised = accepted",
                [(name, encode_ballot(ballot)) for name, ballot in names],
            )

        self._writing(remove)

    def scan(self, prefix: str, after: str = "", limit: int = 10_000) -> list[tuple[str, Answer]]:
        if not self._exists():
            return []
        with self._using("listing") as db:
            rows = db.execute(
                "SELECT name, promised, accepted, head FROM registers "
                "WHERE name >= ? AND name < ? AND name > ? ORDER BY name LIMIT ?",
                (prefix, _after(prefix), after, limit),
            )
            return [(name, _head(promised, accepted, head)) for name, promised, accepted, head in rows]

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    # --- the file ----------------------------------------------------------------------------------------------

    def _exists(self) -> bool:
        return self._connection is not None or os.path.exists(self._path)

    def _writing(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._using("writing") as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                found = work(db)
                failpoint("registers.commit")
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            failpoint("registers.committed")
            return found

    @contextmanager
    def _using(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connected()
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"{doing} the registers in {self._path} failed: {error}; {_advice(error)}") from error

    def _connected(self) -> sqlite3.Connection:
        if self._process != os.getpid():  # a forked child must not use its parent's connection, not even to close it
            self._connection, self._process = None, os.getpid()
        if self._connection is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            db = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
                if mode != "wal":
                    raise sqlite3.OperationalError(f"no write-ahead log here (journal mode {mode})")
                db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA cache_size = -65536")
                db.executescript(_SCHEMA)
            except BaseException:
                db.close()
                raise
            self._connection = db
        return self._connection


def _get(db: sqlite3.Connection, name: str) -> Answer:
    row = db.execute(_READ, (name,)).fetchone()
    if row is None:
        if db.execute("SELECT 1 FROM facts WHERE name = 'incomplete'").fetchone():
            return Damaged("the registers of this member were lost and are not all back")
        return Record()
    promised, accepted, total, head, body = row
    value = None if head is None else Value(head, body or b"")
    try:
        if checksum(name, promised, accepted, value) == total:
            return Record(decode_ballot(promised), decode_ballot(accepted), value)
    except (TypeError, ValueError, AttributeError):
        pass  # SQLite stores any type in any column
    return Damaged("its checksum does not match")


def _head(promised: bytes, accepted: bytes, head: bytes | None) -> Answer:
    try:
        return Record(decode_ballot(promised), decode_ballot(accepted), None if head is None else Value(head))
    except (TypeError, ValueError, AttributeError):
        return Damaged("its ballots can't be read")


def _put(db: sqlite3.Connection, name: str, record: Record) -> None:
    value = record.value
    if value is not None and len(value.head) + len(value.body) > BODY_BYTES:
        raise StoreError(f"the record of {name} has {len(value.body)} bytes; a register takes {BODY_BYTES}")
    promised, accepted = encode_ballot(record.promised), encode_ballot(record.accepted)
    total = checksum(name, promised, accepted, value)
    db.execute(_WRITE, (name, promised, accepted, total, value and value.head, value and value.body))


def _after(prefix: str) -> str:
    """The least string above all that begin with `prefix`."""
    if not prefix:
        return "\U0010ffff"
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _advice(error: Exception) -> str:
    text = str(error)
    if "full" in text:
        return "free space on this disk"
    if "malformed" in text or "not a database" in text:
        return "the file is damaged: run `ckpt-node admin repair`, which takes the records from the other members"
    if "locked" in text or "locking" in text or "log" in text:
        return "it must lie on a local file system; put a ckpt-node in front of a mounted one"
    return "check the disk and the permissions of the folder"


assert encode_ballot(NONE) < encode_ballot(NONE.next_step("a"))
