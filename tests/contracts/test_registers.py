"""The contract of registers, run in memory, in files and on nodes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.registers import BALLOTS, check_eras, check_final, new_registers, record
from helpers.registers import registers as registers
from hypothesis import given

from ckpt.storage.base.errors import StoreError
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DamagedRegister,
    DirectChange,
    Register,
    RegisterValue,
    decode_ballot,
    encode_ballot,
)
from ckpt.storage.registers.sqlite import SqliteRegisters


@given(BALLOTS)
def test_a_ballot_is_decoded_as_it_was_encoded(ballot: Ballot) -> None:
    assert decode_ballot(encode_ballot(ballot)) == ballot


def test_ballots_are_ordered_by_round_writer_and_step() -> None:
    first = Ballot(1, "a")
    direct = first.next_step("x")
    assert NO_BALLOT < NO_BALLOT.next_step("x") < first < direct < direct.next_step("w") < Ballot(1, "b") < Ballot(2, "")


def test_a_register_without_a_value_is_empty(registers: SqliteRegisters) -> None:
    assert registers.read(["a", "b"]) == [Register(), Register()]
    assert registers.scan("") == []


def test_an_empty_disk_does_not_vote(tmp_path: Path) -> None:
    registers = SqliteRegisters(str(tmp_path / "r" / "new.sqlite"))
    assert isinstance(registers.read(["a"])[0], DamagedRegister)
    assert registers.scan("") == []
    assert not (tmp_path / "r").exists(), "a read creates no file"
    assert isinstance(registers.prepare(["a"], Ballot(1, "x"))[0], DamagedRegister)
    assert registers.change([DirectChange("a", NO_BALLOT, RegisterValue(b"1"))], "w") == [False]
    registers.mark_complete()
    assert registers.read(["a"]) == [Register()]


def test_a_register_keeps_its_promises(registers: SqliteRegisters) -> None:
    low, high = Ballot(1, "a"), Ballot(2, "a")
    assert registers.prepare(["x"], high) == [Register(high, NO_BALLOT, None)]
    assert registers.prepare(["x"], low) == [Register(high, NO_BALLOT, None)], "a lower ballot gets the higher one as answer"
    assert registers.accept([("x", RegisterValue(b"h", b"b"))], low) == [False]
    assert registers.accept([("x", RegisterValue(b"h", b"b"))], high) == [True]
    assert record(registers, "x") == Register(high, high, RegisterValue(b"h", b"b"))
    assert registers.prepare(["x"], Ballot(3, "")) == [Register(Ballot(3, ""), high, RegisterValue(b"h", b"b"))]


def test_a_final_value_does_not_change(registers: SqliteRegisters) -> None:
    check_final(registers)


def test_calls_of_earlier_eras_are_refused(registers: SqliteRegisters) -> None:
    check_eras(registers)


def test_a_direct_change_needs_the_present_ballot(registers: SqliteRegisters) -> None:
    first = DirectChange("x", NO_BALLOT, RegisterValue(b"1"))
    assert registers.change([first, DirectChange("y", NO_BALLOT, RegisterValue(b"2"))], "w") == [True, True]
    assert registers.change([first], "v") == [False], "the register is not empty any more"
    at = record(registers, "x").accepted_ballot
    assert at == NO_BALLOT.next_step("w")
    assert registers.change([DirectChange("x", at, RegisterValue(b"3"))], "v") == [True]
    registers.prepare(["x"], Ballot(1, "p"))
    now = record(registers, "x")
    assert registers.change([DirectChange("x", now.accepted_ballot, RegisterValue(b"4"))], "v") == [False], (
        "a promise was given"
    )
    assert now.value == RegisterValue(b"3")


def test_a_scan_lists_names_by_prefix_in_order(registers: SqliteRegisters) -> None:
    names = ["a", "a/1", "a/2", "a0", "b", "ä/1", "a/\U0001f600"]
    registers.change([DirectChange(n, NO_BALLOT, RegisterValue(n.encode(), b"body")) for n in names], "w")
    assert [n for n, _ in registers.scan("")] == sorted(names)
    assert [n for n, _ in registers.scan("a/")] == ["a/1", "a/2", "a/\U0001f600"]
    assert [n for n, _ in registers.scan("a/", "a/1", 1)] == ["a/2"]
    found = dict(registers.scan_all(""))["b"]
    assert isinstance(found, Register)
    assert found.value == RegisterValue(b"b"), "a scan omits the body"


@pytest.mark.parametrize("column", ["promised", "accepted", "head", "body"])
def test_a_damaged_record_does_not_vote(registers: SqliteRegisters, column: str) -> None:
    registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b"head", b"body"))], "w")
    registers.close()
    with sqlite3.connect(registers._path) as db:
        db.execute(f"UPDATE registers SET {column} = x'00ff'")
    db.close()
    (answer,) = registers.read(["x"])
    assert isinstance(answer, DamagedRegister)
    assert isinstance(registers.prepare(["x"], Ballot(9, ""))[0], DamagedRegister)
    assert registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b"1"))], "v") == [False]
    assert registers.accept([("x", RegisterValue(b"1"))], Ballot(9, "")) == [False]
    assert registers.accept([("x", RegisterValue(b"1"))], Ballot(9, ""), repair_damaged=True) == [True]
    assert record(registers, "x").value == RegisterValue(b"1")


@pytest.mark.parametrize("column", ["promised", "accepted", "head", "body"])
def test_a_damaged_record_with_a_text_that_is_not_utf_8_does_not_fail_other_records(
    registers: SqliteRegisters, column: str
) -> None:
    """One flipped bit in the header of a row makes a text of a BLOB."""
    for name in "xy":
        registers.change([DirectChange(name, NO_BALLOT, RegisterValue(b"\xffhead", b"\xffbody"))], "w")
    execute(registers, f"UPDATE registers SET {column} = CAST(x'fe00' AS TEXT) WHERE name = 'x'")
    damaged, other = registers.read(["x", "y"])
    assert isinstance(damaged, DamagedRegister)
    assert isinstance(other, Register)
    assert isinstance(dict(registers.scan(""))["y"], Register)
    assert registers.accept([("x", RegisterValue(b"1")), ("y", RegisterValue(b"2"))], Ballot(9, "")) == [False, True]
    assert registers.accept([("x", RegisterValue(b"1"))], Ballot(9, ""), repair_damaged=True) == [True]
    assert record(registers, "x").value == RegisterValue(b"1")


def test_a_value_that_became_a_text_with_the_same_bytes_is_intact(registers: SqliteRegisters) -> None:
    registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b"\xffhead", b"\xffbody"))], "w")
    execute(registers, "UPDATE registers SET head = CAST(head AS TEXT), body = CAST(body AS TEXT)")
    assert record(registers, "x").value == RegisterValue(b"\xffhead", b"\xffbody")


@pytest.mark.parametrize("sql", [
    "UPDATE facts SET value = NULL", "UPDATE facts SET value = 'x'", "UPDATE registers SET name = CAST(x'78fe' AS TEXT)",
])  # fmt: skip
def test_damage_that_no_checksum_finds_is_named(registers: SqliteRegisters, sql: str) -> None:
    registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b"1"))], "w", 1)
    execute(registers, sql)
    with pytest.raises(StoreError, match="malformed.*and run `ckpt-node admin repair`"):
        registers.read(["z"])
        registers.scan("")


def execute(registers: SqliteRegisters, sql: str) -> None:
    """Change the file of the registers as damage would."""
    registers.close()
    with sqlite3.connect(registers._path) as db:
        db.execute(sql)
    db.close()


def test_a_damaged_file_is_reset_and_kept_aside(registers: SqliteRegisters) -> None:
    registers.change([DirectChange(f"x{i}", NO_BALLOT, RegisterValue(os.urandom(500))) for i in range(100)], "w")
    registers.close()
    with open(registers._path, "r+b") as file:
        file.write(b"\xff" * 30_000)
    with pytest.raises(StoreError, match="move this file away, with -wal and -shm, and run `ckpt-node admin repair`"):
        registers.read(["x1"])
    registers.reset()
    assert isinstance(registers.read(["x1"])[0], DamagedRegister), "a lost record is not an empty one"
    assert registers.accept([("x1", RegisterValue(b"1"))], Ballot(1, "a"), repair_damaged=True) == [True]
    registers.mark_complete()
    assert record(registers, "x1").value == RegisterValue(b"1")
    assert registers.read(["x2"]) == [Register()]
    assert [*Path(registers._path).parent.glob("*.damaged-*")], "the damaged file is kept"


def test_a_value_that_is_too_long_refuses_the_whole_batch(registers: SqliteRegisters) -> None:
    with pytest.raises(StoreError, match="a register takes"):
        registers.change(
            [
                DirectChange("y", NO_BALLOT, RegisterValue(b"")),
                DirectChange("x", NO_BALLOT, RegisterValue(b"", bytes(33 << 20))),
            ],
            "w",
        )
    assert registers.read(["x", "y"]) == [Register(), Register()], "a batch is written whole or not at all"


@pytest.mark.parametrize("point", ["registers.commit", "registers.committed"])
def test_a_batch_is_atomic_when_its_process_is_killed(tmp_path: Path, point: str) -> None:
    program = (
        "import sys; from ckpt.storage.registers.sqlite import SqliteRegisters; from ckpt.storage.registers.base import *\n"
        "SqliteRegisters(sys.argv[1]).change([DirectChange(f'x{i}', NO_BALLOT, RegisterValue(b'v')) for i in range(50)], 'w')\n"
    )
    path = str(tmp_path / "r.sqlite")
    new_registers(Path(path)).close()
    environment = os.environ | {"CKPT_FAILPOINTS": f"{point}=kill"}
    done = subprocess.run([sys.executable, "-c", program, path], env=environment, check=False)
    assert done.returncode == -9
    names = SqliteRegisters(path).scan("")
    assert len(names) == (50 if point == "registers.committed" else 0)
