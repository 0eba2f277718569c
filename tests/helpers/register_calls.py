"""Calls of all kinds to registers, and what the registers report after each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt.storage.base.errors import Outdated
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DirectChange, Registers, RegisterValue
from ckpt.storage.registers.fence_numbers import next_era
from ckpt.storage.registers.sqlite import SqliteRegisters

_NAMES = ["a", "b", "c", "d", "ring/1"]
_ERA = next_era(3) or 0
_FENCE_NUMBERS = (1, 2, 3, _ERA, 4, 5)


def _value(number: int) -> RegisterValue:
    return RegisterValue(f"head {number}".encode(), bytes([number]) * 3000)


def _direct_change(name: str, expected: Ballot, number: int) -> DirectChange:
    return DirectChange(name, expected, _value(number))


CALLS: tuple[Callable[[Registers], Any], ...] = (
    lambda registers: registers.mark_complete(),
    lambda registers: registers.prepare(["a", "b"], Ballot(1, "p")),
    lambda registers: registers.accept([("a", _value(1)), ("b", _value(2))], Ballot(1, "p")),
    lambda registers: registers.change([_direct_change("a", Ballot(1, "p"), 3), _direct_change("c", NO_BALLOT, 4)], "w"),
    lambda registers: registers.prepare(["c", "ring/1"], Ballot(5, "q")),
    lambda registers: registers.learn("d", _value(5)),
    lambda registers: registers.fence(2),
    lambda registers: registers.drop(["b"], 2),
    lambda registers: registers.accept([("a", _value(6))], Ballot(6, "p"), fence_number=2),
    lambda registers: registers.reset(),
    lambda registers: registers.mark_complete(),
    lambda registers: registers.accept([("a", _value(7)), ("ring/1", _value(8))], Ballot(7, "p")),
    lambda registers: registers.join_ring(3, "ring/"),
    lambda registers: registers.change([_direct_change("c", NO_BALLOT, 9)], "w", 3),
    lambda registers: registers.fence(_ERA),
    lambda registers: registers.collect([("c", NO_BALLOT.next_step("w"))], _ERA),
    lambda registers: registers.fence(4),
)
"""Each changes what registers report."""

RESET = 9
"""The index of the call that starts without the existing registers."""


def report(registers: Registers) -> list[Any]:
    """Return all that registers report: each record, the listing, and the fence numbers that they refuse."""
    refused = []
    for number in _FENCE_NUMBERS:
        with suppress(Outdated):
            registers.read([], number)
            continue
        refused.append(number)
    return [registers.read(_NAMES), registers.scan(""), refused]


def reports_after_each_call(folder: Path) -> list[list[Any]]:
    """Return the reports of new registers in a folder: before the first call, and after each one."""
    registers = SqliteRegisters(str(folder / "expected.sqlite"))
    reports = [report(registers)]
    for call in CALLS:
        call(registers)
        reports.append(report(registers))
    registers.close()
    return reports
