"""Registers in one SQLite file, with one fsync for each batch of concurrent changes, and listings by index.

The file must be on a local file system, since the processes of a host share its write-ahead log through memory.
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

from ckpt.storage.base.errors import Outdated, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.fd_io import convert_os_errors
from ckpt.storage.base.file_system_kind import require_local_file_system
from ckpt.storage.base.forks import ForkGate
from ckpt.storage.base.fsync import make_durable_root, sync_folder
from ckpt.storage.base.sqlite_file import open_wal_database
from ckpt.storage.registers.base import (
    REGISTERS_INCOMPLETE,
    Ballot,
    DirectChange,
    Register,
    RegisterAnswer,
    Registers,
    RegisterValue,
    can_accept,
    can_change_directly,
    can_collect,
    final_record,
    is_final,
    require_same_value,
    with_floor_promise,
    with_promise,
)
from ckpt.storage.registers.fence_numbers import advance_fence, order_key, outdated_message
from ckpt.storage.registers.record_rows import (
    FENCE_FACT,
    decode_head,
    decode_name,
    read_fact,
    read_record,
    write_fact,
    write_record,
)

_MAX_BATCH_CALLS = 64
"""The most calls that share a transaction."""

_FORK_GATE = ForkGate()
"""Entered before `SqliteRegisters._lock`: a child would find that lock locked, and those of SQLite itself, too."""

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS registers (
    name TEXT PRIMARY KEY, promised BLOB NOT NULL, accepted BLOB NOT NULL, sum INTEGER NOT NULL, head_sum INTEGER NOT NULL,
    head BLOB, body BLOB
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value);
PRAGMA cache_size = -65536;
"""


class SqliteRegisters(Registers):
    """The registers in the file at `path`, which the first change creates.

    make_folder: creates its folder durably; None for `make_durable_root`.
    """

    def __init__(self, path: str, make_folder: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._make_folder = make_folder
        self._lock = threading.Lock()
        """Guards changes of `_connection` and `_owner_pid`, and is held while the connection is used."""
        self._connection: sqlite3.Connection | None = None
        self._owner_pid = os.getpid()
        # Used without the lock, as each of its calls is atomic.
        self._queued_calls: deque[tuple[Callable[[sqlite3.Connection], object], Future[Any]]] = deque()

    def read(self, names: Sequence[str], fence_number: int = 0) -> list[RegisterAnswer]:
        if not self._exists():
            return [REGISTERS_INCOMPLETE] * len(names)
        with self._read_snapshot("reading") as db:
            _require_current_fence(db, fence_number)
            return [read_record(db, name) for name in names]

    def prepare(self, names: Sequence[str], ballot: Ballot, fence_number: int = 0) -> list[RegisterAnswer]:
        def promise_all(db: sqlite3.Connection) -> list[RegisterAnswer]:
            answers: list[RegisterAnswer] = []
            for name in names:
                record = read_record(db, name)
                if (new := with_promise(record, ballot)) is not None:
                    write_record(db, name, new)
                answers.append(new or record)
            return answers

        return self._write_in_batch(promise_all, fence_number)

    def accept(
        self, values: Sequence[tuple[str, RegisterValue]], ballot: Ballot, repair_damaged: bool = False, fence_number: int = 0
    ) -> list[bool]:
        def accept_all(db: sqlite3.Connection) -> list[bool]:
            answers = []
            for name, value in values:
                is_accepted = can_accept(read_record(db, name), ballot, repair_damaged)
                if is_accepted:
                    write_record(db, name, Register(ballot, ballot, value))
                answers.append(is_accepted)
            return answers

        return self._write_in_batch(accept_all, fence_number)

    def change(self, changes: Sequence[DirectChange], writer: str, fence_number: int = 0) -> list[bool]:
        def change_all(db: sqlite3.Connection) -> list[bool]:
            answers = []
            for change in changes:
                is_changed = can_change_directly(read_record(db, change.name), change)
                if is_changed:
                    ballot = change.expected.next_step(writer)
                    write_record(db, change.name, Register(ballot, ballot, change.value))
                answers.append(is_changed)
            return answers

        return self._write_in_batch(change_all, fence_number)

    def reset(self) -> None:
        with _FORK_GATE.no_fork(), self._lock:
            if self._connection is not None and self._owner_pid == os.getpid():
                self._connection.close()
            self._connection = None
            old_path = f"{self._path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
            for end in ("", "-wal", "-shm"):
                with convert_os_errors("renaming", self._path + end):
                    try:
                        os.replace(self._path + end, old_path + end)
                    except FileNotFoundError:
                        continue
                # Sync after each rename: if a crash brought back the file without its log, the registers would forget promises.
                sync_folder(os.path.dirname(os.path.abspath(self._path)))

    def mark_complete(self) -> None:
        self._write_in_batch(lambda db: write_fact(db, "complete", 1))

    def fence(self, fence_number: int) -> bool:
        return self._write_in_batch(lambda db: _advance_fence(db, fence_number))

    def learn(self, name: str, value: RegisterValue) -> None:
        def learn_value(db: sqlite3.Connection) -> None:
            if is_final(current := read_record(db, name)):
                require_same_value(current, name, value)
            else:
                write_record(db, name, final_record(value))

        self._write_in_batch(learn_value)

    def join_ring(self, fence_number: int, kept_prefix: str) -> None:
        def start_ring(db: sqlite3.Connection) -> None:
            if _advance_fence(db, fence_number):
                db.execute("DELETE FROM registers WHERE substr(name, 1, ?) <> ?", (len(kept_prefix), kept_prefix))
                write_fact(db, "complete", 1)

        self._write_in_batch(start_ring)

    def drop(self, names: Sequence[str], fence_number: int) -> None:
        self._write_in_batch(
            lambda db: db.executemany("DELETE FROM registers WHERE name = ?", [(n,) for n in names]), fence_number
        )

    def collect(self, expected_ballots: Sequence[tuple[str, Ballot]], fence_number: int) -> int:
        def collect_all(db: sqlite3.Connection) -> int:
            own_number = read_fact(db, FENCE_FACT)
            removed_names = [
                (name,) for name, ballot in expected_ballots if can_collect(read_record(db, name), ballot, own_number)
            ]
            return db.executemany("DELETE FROM registers WHERE name = ?", removed_names).rowcount if removed_names else 0

        return self._write_in_batch(collect_all, fence_number)

    def scan(
        self, prefix: str, after: str = "", limit: int = 10_000, fence_number: int = 0
    ) -> list[tuple[str, RegisterAnswer]]:
        if not self._exists():
            return []
        with self._read_snapshot("listing") as db:
            _require_current_fence(db, fence_number)
            rows = db.execute(
                "SELECT name, promised, accepted, head_sum, head FROM registers "
                "WHERE name >= ? AND name < ? AND name > ? ORDER BY name LIMIT ?",
                (prefix, _prefix_end(prefix), after, limit),
            )
            own_number = read_fact(db, FENCE_FACT)
            found = [(name := decode_name(row[0]), decode_head(name, *row[1:])) for row in rows]
            return [
                (name, with_floor_promise(each, own_number) if isinstance(each, Register) else each) for name, each in found
            ]

    def close(self) -> None:
        with _FORK_GATE.no_fork(), self._lock:
            if self._connection is not None and self._owner_pid == os.getpid():
                self._connection.close()
            self._connection = None

    # --- the file ----------------------------------------------------------------------------------------------

    def _exists(self) -> bool:
        if self._connection is not None:
            return True
        with convert_os_errors("looking up", self._path):
            try:
                os.stat(self._path)
            except FileNotFoundError:
                return False
            return True

    def _write_in_batch(self, work: Callable[[sqlite3.Connection], T], fence_number: int = 0) -> T:
        """Run `work` in a durable transaction and return its result.

        Concurrent calls share a transaction and its fsync: the thread that gets the lock runs the work of all waiting threads.
        """

        def checked(db: sqlite3.Connection) -> T:
            _require_current_fence(db, fence_number)
            _advance_fence(db, fence_number)
            return work(db)

        result: Future[T] = Future()
        self._queued_calls.append((checked, result))
        try:
            with self._locked_connection("writing") as db:
                while not result.done():
                    self._commit_batch(db)
        except BaseException:
            with suppress(ValueError):
                self._queued_calls.remove((checked, result))
            raise
        return result.result()

    def _commit_batch(self, db: sqlite3.Connection) -> None:
        """Run queued calls in one transaction. Each call that it takes from the queue gets a result or an error in any case.

        Otherwise the thread of that call would wait endlessly, with the lock.
        """
        batch: list[tuple[Callable[[sqlite3.Connection], object], Future[Any]]] = []
        try:
            while self._queued_calls and len(batch) < _MAX_BATCH_CALLS:
                batch.append(self._queued_calls[0])  # an error between these two lines leaves a call in both places
                self._queued_calls.popleft()
            batch = [(work, future) for work, future in batch if not future.done()]
            outcomes = self._run_batch(db, batch)
            failpoint("registers.committed")
            for future, found, failed in outcomes:
                if failed is None:
                    future.set_result(found)
                else:
                    future.set_exception(failed)
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(_as_store_error(self._path, "writing", error))
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _run_batch(
        self, db: sqlite3.Connection, batch: Sequence[tuple[Callable[[sqlite3.Connection], object], Future[Any]]]
    ) -> list[tuple[Future[Any], object, BaseException | None]]:
        """Run calls in one transaction, make it durable, and return the result or the error of each call."""
        outcomes: list[tuple[Future[Any], object, BaseException | None]] = []
        db.execute("BEGIN IMMEDIATE")
        for work, future in batch:
            db.execute("SAVEPOINT one")
            try:
                outcomes.append((future, work(db), None))
            except sqlite3.Error:
                raise
            except Exception as error:  # only this call fails
                db.execute("ROLLBACK TO one")
                outcomes.append((future, None, error))
            db.execute("RELEASE one")
        failpoint("registers.commit")
        db.execute("COMMIT")
        return outcomes

    @contextmanager
    def _read_snapshot(self, action: str) -> Iterator[sqlite3.Connection]:
        """Open a read transaction, so that several reads see one state: another process may fence and drop between them."""
        with self._locked_connection(action) as db:
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.execute("COMMIT")

    @contextmanager
    def _locked_connection(self, action: str) -> Iterator[sqlite3.Connection]:
        with _FORK_GATE.no_fork(), self._lock:
            try:
                yield self._connect()
            except (sqlite3.Error, OSError) as error:
                raise _as_store_error(self._path, action, error) from error

    def _connect(self) -> sqlite3.Connection:
        """Return the connection, which is opened when it is first needed. Needs `_lock`."""
        if self._owner_pid != os.getpid():  # a forked child must not use its parent's connection, not even to close it
            self._connection, self._owner_pid = None, os.getpid()
        if self._connection is None:
            require_local_file_system(os.path.dirname(self._path), "registers", "use a local disk, and serve it with ckpt-node")
            folder = os.path.dirname(os.path.abspath(self._path))
            (self._make_folder or make_durable_root)(folder)  # SQLite makes its files durable, but not their folder
            self._connection = open_wal_database(self._path, _SCHEMA)
            self._connection.text_factory = bytes  # a damaged record may have a text that is not UTF-8 in any column
        return self._connection


def _as_store_error(path: str, action: str, error: BaseException) -> BaseException:
    """Return an error of SQLite or of the system as StoreError, any other error unchanged."""
    if not isinstance(error, sqlite3.Error | OSError):
        return error
    store_error = StoreError(f"{action} the registers in {path} failed: {error}; {_error_advice(error)}")
    store_error.__cause__ = error
    return store_error


def _require_current_fence(db: sqlite3.Connection, fence_number: int) -> None:
    if fence_number and order_key(fence_number) < order_key(own_number := read_fact(db, FENCE_FACT)):
        raise Outdated(outdated_message(own_number, fence_number))


def _advance_fence(db: sqlite3.Connection, fence_number: int) -> bool:
    """Fence the member by a number; return whether it is higher than the previous one."""
    before = read_fact(db, FENCE_FACT)
    after = advance_fence(before, fence_number)
    if after != before:
        write_fact(db, FENCE_FACT, after)
    return order_key(after) > order_key(before)


def _prefix_end(prefix: str) -> str:
    """Return the lowest string above all strings that begin with `prefix`."""
    if not prefix:
        return "\U0010ffff"
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _error_advice(error: Exception) -> str:
    text = str(error)
    if "full" in text:
        return "free space on this disk"
    if "malformed" in text or "not a database" in text:
        return "the file is damaged: end its node, move this file away, with -wal and -shm, and run `ckpt-node admin repair`"
    if "locked" in text or "locking" in text or "log" in text:
        return "end a process that keeps it locked, or if its file system is not local put a ckpt-node in front of it"
    return "check the disk and the permissions of the folder"
