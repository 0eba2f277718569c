"""After a power loss of the host of a run at any moment, its run log is whole, and `ckpt-run` completes the job."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import CountCases
from helpers.crash_states import CrashState
from helpers.folders import PROGRAMS
from helpers.mounts import why_no_fuse
from helpers.power_loss import first_wrong, recording_mount
from helpers.processes import SOAK
from helpers.runs import PROGRAM

import ckpt
from ckpt.recovery.goodput.ledger import read_ledgers
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.sqlite import SqliteRunLog

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

STEPS = 14


def arguments(folder: Path) -> list[str]:
    """Return the arguments of ckpt-run for a job of one rank that saves in a folder, and fails once."""
    job = [sys.executable, PROGRAM, str(folder), str(STEPS), "0.01", "raise", "11", "0"]
    return ["-n", "1", "--cold", "--run-dir", str(folder / "run"), "--", *job]


def record_run(folder: Path, left_out: str = "nothing") -> tuple[Path, list[LogEntry]]:
    """Record a run until its end; return the log of the recording, and the entries of the run."""
    with recording_mount(folder) as recording:
        program = [str(PROGRAMS / "recorded_run.py"), str(recording.mount), left_out]
        command = [sys.executable, *program, *arguments(recording.mount)]
        subprocess.run(command, env=recording.environment(), check=True, timeout=600, stderr=subprocess.DEVNULL)
        with contextlib.closing(SqliteRunLog(folder / "below" / "run", read_only=True)) as run_log:
            return recording.log, run_log.entries()


def what_is_wrong(expected: list[LogEntry], completes: Callable[[], bool], state: CrashState, folder: Path) -> str | None:
    """Return what is wrong in a state, None if its log has the acknowledged entries.

    completes: returns whether to run the job again on the state, until its end.
    """
    acknowledged = max(map(int, state.acknowledged), default=0)
    try:
        read_ledgers(folder / "run")
        if acknowledged:
            with contextlib.closing(SqliteRunLog(folder / "run", read_only=True)) as run_log:
                entries = run_log.entries()
            if len(entries) < acknowledged or entries != expected[: len(entries)]:
                return f"entry {acknowledged} was acknowledged, and the entries are {[entry.kind for entry in entries]}"
    except ckpt.CkptError as error:
        return str(error)
    return wrong_in_next_run(folder) if completes() else None


def wrong_in_next_run(folder: Path) -> str | None:
    """Run the job again. Return what is wrong, None if it computes the same as without a power loss."""
    command = [sys.executable, "-m", "ckpt.tools.run", *arguments(folder)]
    ended = subprocess.run(command, timeout=600, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        return f"the next ckpt-run ended with {ended.returncode}: {ended.stderr}"
    w = np.zeros((4, 100))
    for step in range(STEPS):
        w += np.sin(step * 1.7)
    return None if np.array_equal(np.load(folder / "end-0.npy"), w) else "the next run has another result"


@pytest.mark.soak
def test_a_run_is_completed_after_a_power_loss_at_any_moment(tmp_path: Path, count_cases: CountCases) -> None:
    """Each state is read, and the job runs again on every 40th."""
    log, expected = record_run(tmp_path)
    numbers = itertools.count(1)
    amount = (10, 1.0) if SOAK else (1, 0.1)
    assert (
        first_wrong(log, partial(what_is_wrong, expected, lambda: next(numbers) % 40 == 0), *amount, count_cases=count_cases)
        is None
    )


@pytest.mark.parametrize("left_out", ["synchronous=NORMAL", "make_durable_root"])
def test_a_missing_fsync_of_the_log_of_a_run_is_found(tmp_path: Path, left_out: str) -> None:
    """Else the test above could not fail."""
    log, expected = record_run(tmp_path, left_out)
    assert first_wrong(log, partial(what_is_wrong, expected, lambda: False), 1) is not None
