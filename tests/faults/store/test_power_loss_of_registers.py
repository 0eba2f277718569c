"""After a power loss at any moment, the registers of a member have each acknowledged promise, value and fence number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.crash_states import CrashState
from helpers.mounts import why_no_fuse
from helpers.power_loss import AMOUNT, first_wrong, record
from helpers.register_calls import report, reports_after_each_call

import ckpt
from ckpt.storage.registers.base import Ballot, RegisterValue
from ckpt.storage.registers.sqlite import SqliteRegisters

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

FILE = "members/a/registers.sqlite"

TWO_PROCESSES = f"""
import os, sys
from ckpt.storage.registers import sqlite
from helpers.crash_states import leave_out
from helpers.power_loss import acknowledge
from helpers.register_calls import CALLS, RESET

mount, left_out = sys.argv[1:]
leave_out(left_out, sqlite)

def make(begin, end):
    registers = sqlite.SqliteRegisters(f"{{mount}}/{FILE}")
    for number in range(begin, end):
        CALLS[number](registers)
        acknowledge(mount, number)
    return registers

if not (killed := os.fork()):
    make(0, 5).close()  # the file has these changes, and the write-ahead log has those of the next calls
    make(5, RESET)
    os._exit(0)
os.waitpid(killed, 0)
make(RESET, len(CALLS)).close()
"""
"""A process makes the calls before the reset and is killed, and another one makes those after it."""


@pytest.fixture
def wrong_in_registers(tmp_path: Path) -> Callable[[CrashState, Path], str | None]:
    """Return a function that returns what is wrong in a state."""
    return partial(what_is_wrong, reports_after_each_call(tmp_path))


def what_is_wrong(reports: list[object], state: CrashState, folder: Path) -> str | None:
    """Return what is wrong in a state, None if it has all acknowledged calls, no part of a call, and takes the next one."""
    count = len(state.acknowledged)
    ballot, value = Ballot(1 << 50, "next"), RegisterValue(b"next")  # above the floors of all fence numbers
    try:
        with contextlib.closing(SqliteRegisters(str(folder / FILE))) as registers:
            if (found := report(registers)) not in reports[count : count + 2]:
                return f"after {count} calls, the registers report {found}"
            registers.accept([("a", value)], ballot, repair_damaged=True)
            (after,) = registers.read(["a"])
            return None if getattr(after, "value", None) == value else "the next value is not found"
    except ckpt.CkptError as error:
        return f"the registers can't be used: {error}"


@pytest.mark.soak
def test_acknowledged_calls_survive_a_power_loss_at_any_moment(
    tmp_path: Path, wrong_in_registers: Callable[[CrashState, Path], str | None], count_cases: CountCases
) -> None:
    assert first_wrong(record(tmp_path, TWO_PROCESSES), wrong_in_registers, *AMOUNT, count_cases=count_cases) is None


@pytest.mark.parametrize("left_out", ["synchronous=NORMAL", "synchronous=OFF", "make_durable_root", "sync_folder"])
def test_a_missing_fsync_of_registers_is_found(
    tmp_path: Path, wrong_in_registers: Callable[[CrashState, Path], str | None], left_out: str
) -> None:
    """Else the test above could not fail."""
    assert first_wrong(record(tmp_path, TWO_PROCESSES, left_out), wrong_in_registers, 1) is not None
