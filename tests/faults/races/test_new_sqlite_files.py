"""Several processes create a SQLite file at once: the registers of a member, or the log of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.registers.base import NO_BALLOT, DirectChange, RegisterValue
from ckpt.storage.registers.sqlite import SqliteRegisters

ROUNDS, WRITERS = 100, 4


def write_register(folder: Path, writer: int) -> bool:
    with closing(SqliteRegisters(str(folder / "registers.sqlite"))) as registers:
        registers.mark_complete()
        return registers.change([DirectChange(f"x{writer}", NO_BALLOT, RegisterValue(b"1"))], "w") == [True]


def open_log(folder: Path, _: int) -> bool:
    with closing(SqliteRunLog(folder)) as run_log:
        return run_log.entries() == []


@pytest.mark.parametrize("use", [write_register, open_log])
def test_a_file_that_several_open_at_once_is_not_locked(tmp_path: Path, use: Callable[[Path, int], bool]) -> None:
    """Each opens a connection of its own, as processes do. SQLite does not wait where two switch a new file to its log."""
    barrier = threading.Barrier(WRITERS)

    def write(folder: Path, writer: int) -> bool:
        barrier.wait(300)
        return use(folder, writer)

    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(ROUNDS):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert all(pool.map(write, [folder] * WRITERS, range(WRITERS)))
