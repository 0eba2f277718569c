"""ckpt-chaos (PyPI) kills a program at its file events, and compares what a second start of it does with an undisturbed run.

It kills before an event, or sends SIGTERM there and kills a second later. The second start must continue from the newest
complete step, and end with the same bits.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.folders import PROGRAMS, fast_folder
from helpers.processes import SOAK

PROGRAM = str(PROGRAMS / "chaos_training.py")
POINTS = 10_000 if SOAK else 6
"""More than there are: each event in each way."""
FAILURES = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
WAYS = "before,term"


def run_chaos(folder: Path, options: Sequence[str], result: str, *arguments: str) -> tuple[int, str, int]:
    """Kill the training at events; return the exit status, the report, and how many times it was killed.

    result: the name of the file with its result. arguments: of the training.
    """
    command = [
        sys.executable, "-m", "ckpt_chaos", "run", "--work", str(folder / "work"), "--jobs", "3", "--fail-on", FAILURES,
        "--step-regex", r"resumed from step (\d+)", "--result-file", f"{{out}}/{result}", *options,
        "--", sys.executable, PROGRAM, "{out}", *arguments,
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ended.returncode, ended.stdout, len(list((folder / "work").glob("pt_[0-9]*/result.json")))


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "crash_rank"), [(1, 0), (2, 0), (2, 1)], ids=["alone", "rank 0 of 2", "rank 1 of 2"])
def test_a_training_killed_at_any_file_event_continues_from_its_newest_step(
    ranks: int, crash_rank: int, tmp_path: Path, count_cases: CountCases
) -> None:
    options = [
        "--modes", WAYS, "--grace", "1", "--max-points", str(POINTS), "--checkpoint-glob", "{out}/repo/steps/*",
        "--ranks", str(ranks), "--crash-rank", str(crash_rank),
    ]  # fmt: skip
    with fast_folder(tmp_path) as folder:
        status, report, killed = run_chaos(folder, options, f"result-{crash_rank}.npy")
    assert status == 0, report
    assert killed >= min(POINTS, 60), report
    count_cases(killed)


def test_a_training_that_overwrites_its_only_step_is_found(tmp_path: Path) -> None:
    with fast_folder(tmp_path) as folder:
        status, report, _ = run_chaos(folder, ["--modes", "torn"], "result-0.npy", "plain")
    assert status == 1, report
    assert "HARD_FAIL" in report
