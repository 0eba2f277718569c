"""Calls of several threads that share a transaction: each of them ends, whatever happens to the thread that runs them all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import until

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.registers.base import Ballot, Register, RegisterValue
from ckpt.storage.registers.sqlite import SqliteRegisters

CALLS = 4
BALLOT = Ballot(1, "a")


@pytest.fixture
def registers(tmp_path: Path) -> Iterator[SqliteRegisters]:
    made = SqliteRegisters(str(tmp_path / "registers.sqlite"))
    made.mark_complete()
    yield made
    set_failpoints("")
    made.close()


def run_in_one_transaction(registers: SqliteRegisters) -> list[BaseException | None]:
    """Make several calls that one thread runs together, and return the error of each."""
    errors: dict[int, BaseException | None] = {}

    def accept(number: int) -> None:
        try:
            registers.accept([(f"/{number}", RegisterValue(b"1"))], BALLOT)
            errors[number] = None
        except (StoreError, MemoryError) as error:
            errors[number] = error

    threads = [threading.Thread(target=accept, args=(number,), daemon=True) for number in range(CALLS)]
    with registers._lock:
        for thread in threads:
            thread.start()
        until(lambda: len(registers._queued_calls) == CALLS, "all calls are queued")
    until(lambda: not any(thread.is_alive() for thread in threads), "all calls have ended")
    return [errors[number] for number in range(CALLS)]


def test_an_error_after_the_commit_ends_all_calls(registers: SqliteRegisters) -> None:
    set_failpoints("registers.committed=error@1")
    errors = run_in_one_transaction(registers)
    assert all(isinstance(error, StoreError) for error in errors), errors
    assert registers.read(["/0"]) == [Register(BALLOT, BALLOT, RegisterValue(b"1"))], (
        "an error does not say that nothing changed"
    )
    assert run_in_one_transaction(registers) == [None] * CALLS


class Exhausted(deque[Any]):
    """A queue in which the process gets no memory when it has just taken the second call."""

    taken = 0

    def popleft(self) -> Any:
        found = super().popleft()
        self.taken += 1
        if self.taken == 2:
            raise MemoryError
        return found


def test_a_lack_of_memory_ends_all_calls(registers: SqliteRegisters) -> None:
    registers._queued_calls = Exhausted()
    errors = run_in_one_transaction(registers)
    assert any(isinstance(error, MemoryError) for error in errors)
    assert run_in_one_transaction(registers) == [None] * CALLS
