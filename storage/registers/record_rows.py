"""The rows of the tables of `SqliteRegisters`: reads and checks records, names and facts, and writes records and facts.

The connection returns texts as bytes, because a damaged record may have a text that is not UTF-8 in any column.
"""

from __future__ import annotations

import sqlite3

from ckpt.storage.registers.base import (
    REGISTERS_INCOMPLETE,
    DamagedRegister,
    Register,
    RegisterAnswer,
    RegisterValue,
    decode_ballot,
    encode_ballot,
    record_checksum,
    require_record_fits,
    with_floor_promise,
)

FENCE_FACT = "epoch"
"""The name of the fence number of the member in the table of facts."""

_MALFORMED = "database disk image is malformed"
"""The message of SQLite for damage. It is also used for damage that SQLite does not find."""

_READ_SQL = "SELECT promised, accepted, sum, head, body FROM registers WHERE name = ?"
_WRITE_SQL = (
    "INSERT OR REPLACE INTO registers (name, promised, accepted, sum, head_sum, head, body) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def read_fact(db: sqlite3.Connection, name: str) -> int:
    """Return a fact of the member, 0 if it has none; raise DatabaseError for one that is not a number."""
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    if row is not None and not isinstance(row[0], int):
        raise sqlite3.DatabaseError(f"{_MALFORMED}: the value of {name} is not a number")
    return 0 if row is None else int(row[0])


def write_fact(db: sqlite3.Connection, name: str, value: int) -> None:
    """Write a fact of the member."""
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def read_record(db: sqlite3.Connection, name: str) -> RegisterAnswer:
    """Return the record of a register, or that it is damaged or may have been lost."""
    row = db.execute(_READ_SQL, (name,)).fetchone()
    if row is None:
        return with_floor_promise(Register(), read_fact(db, FENCE_FACT)) if read_fact(db, "complete") else REGISTERS_INCOMPLETE
    promised, accepted, total, head, body = row
    value = None if head is None else RegisterValue(head, body or b"")
    try:
        if record_checksum(name, promised, accepted, value) == total:
            found = Register(decode_ballot(promised), decode_ballot(accepted), value)
            return found if value is not None else with_floor_promise(found, read_fact(db, FENCE_FACT))
    except (TypeError, ValueError, AttributeError):
        pass  # SQLite stores any type in any column
    return DamagedRegister("its checksum does not match")


def decode_head(name: str, promised: bytes, accepted: bytes, total: int, head: bytes | None) -> RegisterAnswer:
    """Return the record of a register without its body. total: the checksum of both."""
    value = None if head is None else RegisterValue(head)
    try:
        if record_checksum(name, promised, accepted, value) == total:
            return Register(decode_ballot(promised), decode_ballot(accepted), value)
    except (TypeError, ValueError, AttributeError):
        pass
    return DamagedRegister("the checksum of its head does not match")


def decode_name(name: object) -> str:
    """Return the name of a register in a listing; raise DatabaseError for a damaged one, as the true one is unknown."""
    try:
        if isinstance(name, bytes):
            return name.decode()
    except UnicodeDecodeError:
        pass
    raise sqlite3.DatabaseError(f"{_MALFORMED}: {name!r:.60} is not the name of a register")


def write_record(db: sqlite3.Connection, name: str, record: Register) -> None:
    """Write a record with its checksums; raise StoreError if its value is too long."""
    value = record.value
    require_record_fits(name, value)
    promised, accepted = encode_ballot(record.promised_ballot), encode_ballot(record.accepted_ballot)
    total = record_checksum(name, promised, accepted, value)
    of_head = record_checksum(name, promised, accepted, value and RegisterValue(value.head))
    db.execute(_WRITE_SQL, (name, promised, accepted, total, of_head, value and value.head, value and value.body))
