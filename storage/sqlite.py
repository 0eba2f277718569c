"""Registers in one SQLite file: thousands of small changes a second with one fsync a batch, and listings by index.

For a local file system: the write-ahead log is shared through memory by the processes of one host.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ckpt.storage.errors import Outdated, StoreError
from ckpt.storage.failpoints import failpoint
from ckpt.storage.fence_numbers import in_order, outdated, raised
from ckpt.storage.local_file_system import require_local
from ckpt.storage.registers import (
    BODY_BYTES,
    NONE,
    UNKNOWN,
    Answer,
    Ballot,
    Change,
    Damaged,
    Record,
    Registers,
    Value,
    accepts,
    check_same,
    checksum,
    collectable,
    decode_ballot,
    encode_ballot,
    final,
    is_final,
    shown,
    taken,
    with_promise,
)

_GROUP = 64
"""Calls that share a transaction at most."""

_BUSY_SECONDS = 30.0
"""How long a call waits for another process's batch."""

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS registers (
    name TEXT PRIMARY KEY, promised BLOB NOT NULL, accepted BLOB NOT NULL, sum INTEGER NOT NULL, head_sum INTEGER NOT NULL,
    head BLOB, body BLOB
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value)
"""

_READ = "SELECT promised, accepted, sum, head, body FROM registers WHERE name = ?"
_WRITE = "INSERT OR REPLACE INTO registers (name, promised, accepted, sum, head_sum, head, body) VALUES (?, ?, ?, ?, ?, ?, ?)"


class SqliteRegisters(Registers):
    """The registers in the file at `path`, which is made when first written to."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = os.getpid()
        self._waiting: deque[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]] = deque()

    def read(self, names: Sequence[str], epoch: int = 0) -> list[Answer]:
        if not self._exists():
            return [UNKNOWN] * len(names)
        with self._snapshot("reading") as db:
            _check(db, epoch)
            return [_get(db, name) for name in names]

    def prepare(self, names: Sequence[str], ballot: Ballot, epoch: int = 0) -> list[Answer]:
        def promise(db: sqlite3.Connection) -> list[Answer]:
            answers: list[Answer] = []
            for name in names:
                record = _get(db, name)
                if (new := with_promise(record, ballot)) is not None:
                    _put(db, name, new)
                answers.append(new or record)
            return answers

        return self._writing(promise, epoch)

    def accept(self, values: Sequence[tuple[str, Value]], ballot: Ballot, heal: bool = False, epoch: int = 0) -> list[bool]:
        def take(db: sqlite3.Connection) -> list[bool]:
            answers = []
            for name, value in values:
                good = accepts(_get(db, name), ballot, heal)
                if good:
                    _put(db, name, Record(ballot, ballot, value))
                answers.append(good)
            return answers

        return self._writing(take, epoch)

    def change(self, changes: Sequence[Change], writer: str, epoch: int = 0) -> list[bool]:
        def take(db: sqlite3.Connection) -> list[bool]:
            answers = []
            for change in changes:
                good = taken(_get(db, change.name), change)
                if good:
                    ballot = change.expected.next_step(writer)
                    _put(db, change.name, Record(ballot, ballot, change.value))
                answers.append(good)
            return answers

        return self._writing(take, epoch)

    def start_anew(self) -> None:
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None
            aside = f"{self._path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
            for end in ("", "-wal", "-shm"):
                if os.path.exists(self._path + end):
                    os.replace(self._path + end, aside + end)

    def complete(self) -> None:
        self._writing(lambda db: _note(db, "complete", 1))

    def fence(self, epoch: int) -> bool:
        return self._writing(lambda db: _raise(db, epoch))

    def learn(self, name: str, value: Value) -> None:
        def note(db: sqlite3.Connection) -> None:
            if is_final(there := _get(db, name)):
                check_same(there, name, value)
            else:
                _put(db, name, final(value))

        self._writing(note)

    def join(self, epoch: int, keep: str) -> None:
        def begin(db: sqlite3.Connection) -> None:
            if _raise(db, epoch):
                db.execute("DELETE FROM registers WHERE substr(name, 1, ?) <> ?", (len(keep), keep))
                _note(db, "complete", 1)

        self._writing(begin)

    def drop(self, names: Sequence[str], epoch: int) -> None:
        self._writing(lambda db: db.executemany("DELETE FROM registers WHERE name = ?", [(n,) for n in names]), epoch)

    def collect(self, found: Sequence[tuple[str, Ballot]], epoch: int) -> int:
        def forget(db: sqlite3.Connection) -> int:
            number = _fact(db, "epoch")
            gone = [(name,) for name, ballot in found if collectable(_get(db, name), ballot, number)]
            return db.executemany("DELETE FROM registers WHERE name = ?", gone).rowcount if gone else 0

        return self._writing(forget, epoch)

    def scan(self, prefix: str, after: str = "", limit: int = 10_000, epoch: int = 0) -> list[tuple[str, Answer]]:
        if not self._exists():
            return []
        with self._snapshot("listing") as db:
            _check(db, epoch)
            rows = db.execute(
                "SELECT name, promised, accepted, head_sum, head FROM registers "
                "WHERE name >= ? AND name < ? AND name > ? ORDER BY name LIMIT ?",
                (prefix, _after(prefix), after, limit),
            )
            number = _fact(db, "epoch")
            found = [(row[0], _head(*row)) for row in rows]
            return [(name, shown(each, number) if isinstance(each, Record) else each) for name, each in found]

    def close(self) -> None:
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    # --- the file ----------------------------------------------------------------------------------------------

    def _exists(self) -> bool:
        return self._connection is not None or os.path.exists(self._path)

    def _writing(self, work: Callable[[sqlite3.Connection], T], epoch: int = 0) -> T:
        """Do some work, durably. What other threads want meanwhile goes into one transaction, with one fsync: whoever gets
        the lock does the work of all who wait."""

        def checked(db: sqlite3.Connection) -> T:
            _check(db, epoch)
            _raise(db, epoch)
            return work(db)

        mine: Future[T] = Future()
        self._waiting.append((checked, mine))
        try:
            with self._using("writing") as db:
                while not mine.done():
                    self._write_all(db)
        except BaseException:
            with suppress(ValueError):
                self._waiting.remove((checked, mine))
            raise
        return mine.result()

    def _write_all(self, db: sqlite3.Connection) -> None:
        batch: list[tuple[Callable[[sqlite3.Connection], Any], Future[Any]]] = []
        while self._waiting and len(batch) < _GROUP:
            batch.append(self._waiting.popleft())
        outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            for work, future in batch:
                db.execute("SAVEPOINT one")
                try:
                    outcomes.append((future, work(db), None))
                except sqlite3.Error:
                    raise
                except Exception as error:  # of this work alone
                    db.execute("ROLLBACK TO one")
                    outcomes.append((future, None, error))
                db.execute("RELEASE one")
            failpoint("registers.commit")
            db.execute("COMMIT")
        except BaseException as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            for _, future in batch:
                future.set_exception(_told(self._path, "writing", error))
            return
        failpoint("registers.committed")
        for future, found, failed in outcomes:
            if failed is None:
                future.set_result(found)
            else:
                future.set_exception(failed)

    @contextmanager
    def _snapshot(self, doing: str) -> Iterator[sqlite3.Connection]:
        """For several reads of one moment: another process may fence and drop between them."""
        with self._using(doing) as db:
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("COMMIT")

    @contextmanager
    def _using(self, doing: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._connected()
            except (sqlite3.Error, OSError) as error:
                raise _told(self._path, doing, error) from error

    def _connected(self) -> sqlite3.Connection:
        if self._process != os.getpid():  # a forked child must not use its parent's connection, not even to close it
            self._connection, self._process = None, os.getpid()
        if self._connection is None:
            require_local(
                os.path.dirname(self._path), "registers",
                "use a disk of this host, and reach it from others through a ckpt-node (ckpt://HOST:PORT/…)",
            )  # fmt: skip
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


def _told(path: str, doing: str, error: BaseException) -> BaseException:
    """An error of SQLite or the system as ours; any other as it is."""
    if not isinstance(error, sqlite3.Error | OSError):
        return error
    told = StoreError(f"{doing} the registers in {path} failed: {error}; {_advice(error)}")
    told.__cause__ = error
    return told


def _check(db: sqlite3.Connection, epoch: int) -> None:
    if epoch and in_order(epoch) < in_order(fence := _fact(db, "epoch")):
        raise Outdated(outdated(fence, epoch))


def _raise(db: sqlite3.Connection, epoch: int) -> bool:
    """Fence by a number; whether it is higher than the one before."""
    before = _fact(db, "epoch")
    after = raised(before, epoch)
    if after != before:
        _note(db, "epoch", after)
    return in_order(after) > in_order(before)


def _fact(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def _note(db: sqlite3.Connection, name: str, value: int) -> None:
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _get(db: sqlite3.Connection, name: str) -> Answer:
    row = db.execute(_READ, (name,)).fetchone()
    if row is None:
        return shown(Record(), _fact(db, "epoch")) if _fact(db, "complete") else UNKNOWN
    promised, accepted, total, head, body = row
    value = None if head is None else Value(head, body or b"")
    try:
        if checksum(name, promised, accepted, value) == total:
            found = Record(decode_ballot(promised), decode_ballot(accepted), value)
            return found if value is not None else shown(found, _fact(db, "epoch"))
    except (TypeError, ValueError, AttributeError):
        pass  # SQLite stores any type in any column
    return Damaged("its checksum does not match")


def _head(name: str, promised: bytes, accepted: bytes, total: int, head: bytes | None) -> Answer:
    value = None if head is None else Value(head)
    try:
        if checksum(name, promised, accepted, value) == total:
            return Record(decode_ballot(promised), decode_ballot(accepted), value)
    except (TypeError, ValueError, AttributeError):
        pass
    return Damaged("the checksum of its head does not match")


def _put(db: sqlite3.Connection, name: str, record: Record) -> None:
    value = record.value
    if value is not None and len(value.head) + len(value.body) > BODY_BYTES:
        raise StoreError(f"the record of {name} has {len(value.body)} bytes; a register takes {BODY_BYTES}")
    promised, accepted = encode_ballot(record.promised), encode_ballot(record.accepted)
    total = checksum(name, promised, accepted, value)
    of_head = checksum(name, promised, accepted, value and Value(value.head))
    db.execute(_WRITE, (name, promised, accepted, total, of_head, value and value.head, value and value.body))


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
