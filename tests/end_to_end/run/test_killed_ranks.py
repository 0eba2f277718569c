"""ckpt-run restarts a job whose ranks are killed, stopped, hung or end with an error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import SOAK, stop, until
from helpers.runs import RANKS, Run, assert_result, kill_ranks
from helpers.runs import start as start

from ckpt.recovery.policy.restart_decision import MAX_REPEATED_FAILURES


def test_a_job_without_a_fault_ends_well(start: Callable[..., Run]) -> None:
    run = start()
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == []
    assert run.messages == ""


KILLS = list(product(range(RANKS), [signal.SIGKILL, signal.SIGSEGV])) if SOAK else [(0, signal.SIGKILL), (2, signal.SIGSEGV)]


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "number"), KILLS)
def test_a_job_is_restarted_after_a_killed_rank(start: Callable[..., Run], rank: int, number: signal.Signals) -> None:
    run = start(steps=100)
    run.until_step(12)
    os.kill(run.pid(rank), number)
    assert run.end() == 0, run.messages
    assert_result(run, 100)
    assert run.failures() == [("signal", [rank])]
    killed = rf"rank {rank} was killed by {number.name} after step \d+"
    assert re.search(rf"{killed}; all ranks start again from the newest saved step \(\d+ or later\)", run.messages)


def test_a_warm_start_forks_the_ranks(start: Callable[..., Run]) -> None:
    """The ranks are forked from the fork server, which has imported what they import."""
    run = start("--warm", steps=600)
    command = [sys.executable, "-m", "ckpt.tools.run", "status", "--run-dir", str(run.files)]
    deadline = time.monotonic() + 600
    while "the next start is warm" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout:
        assert time.monotonic() < deadline
    os.kill(run.pid(1), signal.SIGKILL)
    run.until_step(1, attempt=1)
    assert b"fork_server.py" in Path(f"/proc/{run.pid(1)}/cmdline").read_bytes()
    assert run.end() == 0, run.messages
    assert_result(run, 600)
    assert run.failures() == [("signal", [1])]


def test_a_job_is_restarted_after_all_ranks_are_killed_twice(start: Callable[..., Run]) -> None:
    run = start(seconds=0.05)
    for attempt, step in enumerate([12, 22]):
        run.until_step(step, attempt)
        kill_ranks(run)
    assert run.end() == 0, run.messages
    assert_result(run)
    assert len(run.failures()) == 2


def test_a_job_is_restarted_after_a_stopped_rank(start: Callable[..., Run]) -> None:
    run = start(seconds=0.03)
    run.until_step(12)
    stop(run.pid(1))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == [("stopped", [1])]


@pytest.mark.parametrize(
    ("fault", "detail"), [("raise", r"exited with status 1 \(RuntimeError: a bad batch\)"), ("exit", "status 7")]
)
def test_a_job_is_restarted_after_a_failed_rank(start: Callable[..., Run], fault: str, detail: str) -> None:
    run = start(fault=(fault, 17, 1))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == [("exit", [1])]
    assert re.search(detail, run.messages)


def test_a_rank_that_ends_early_fails_the_save_of_the_others(start: Callable[..., Run]) -> None:
    """Status 0 is not a failure by itself. Ranks that wait for its part of a save learn of its end at once, and report it."""
    run = start(fault=("leave", 17, 1))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert "rank 1 of 3 did not write its part of step 19 and has ended" in run.messages, run.messages
    assert len(run.failures()) == 1


def test_a_loss_that_is_not_finite_once_is_tried_again(start: Callable[..., Run]) -> None:
    """The hardware may be the cause: the same batches are tried again, with a correct result."""
    run = start(fault=("nan", 17, 1))
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == [("diverged", [1])]
    assert "the loss of step 17 was nan; the same batches are tried again" in run.messages


def test_a_batch_whose_loss_is_never_finite_is_skipped(start: Callable[..., Run]) -> None:
    """The second time the batch is skipped, and an older step is loaded."""
    run = start(fault=("poison", 17, 1))
    assert run.end() == 0, run.messages
    assert run.failures() == [("diverged", [1])] * 2
    assert "the loss of step 17 was nan; the 2nd time there: batches 16 to 17 are skipped" in run.messages
    environments = [e["facts"]["environment"] for e in run.record() if e["kind"] == "start"]
    assert [each.get("CKPT_SKIP") for each in environments] == [None, None, "16-17"]


def test_a_batch_is_still_skipped_after_ckpt_run_was_killed(start: Callable[..., Run]) -> None:
    """The decision to skip it belongs to the job. Without it, the next run would train on the batch a third time."""
    run = start(fault=("poison", 17, 1))
    until(lambda: any(e["kind"] == "decision" and e["facts"]["skip"] for e in run.record()), "the decision to skip")
    run.process.kill()
    run.process.wait()
    before = len(run.record())
    again = start(fault=("poison", 17, 1))
    assert again.end() == 0, again.messages
    entries = again.record()[before:]
    assert [e["facts"]["environment"].get("CKPT_SKIP") for e in entries if e["kind"] == "start"] == ["16-17"]
    another = start(fault=("poison", 17, 1))
    assert another.end() == 0, another.messages
    assert "CKPT_SKIP" not in another.record()[-2]["facts"]["environment"], "the run before has ended by itself"


def test_a_job_that_always_fails_is_given_up(start: Callable[..., Run]) -> None:
    """It ends with the reason, and is not restarted forever."""
    run = start(fault=("always", 0, 0))
    assert run.end() == 1
    assert len(run.failures()) == MAX_REPEATED_FAILURES
    advice = f"look at {run.files}/logs/2/rank-0.log"
    assert run.messages.strip().endswith(f"times in a row, at the same place, with no newer step saved: {advice}")
    assert "RuntimeError: there is no data" in run.messages
    command = [sys.executable, "-m", "ckpt.tools.run", "why", "--run-dir", str(run.files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "halt: rank 0 exited with status 1 (RuntimeError: there is no data) before the first step" in done.stdout


ROTTEN = """
import ckpt, numpy as np, os
attempt = int(os.environ["CKPT_ATTEMPT"])
with ckpt.Checkpointer("repo", every=5, keep=5) as ck:
    state, start = ck.restore({"a": np.zeros(3)})
    with open("restored", "a") as file:
        print(start - 1, file=file)
    for step in range(start, 50):
        state["a"] += 1
        if step == SPOILED and attempt == 0:
            state["a"][:] = -1e9
        if state["a"][0] < 0 and step == PLACE:
            raise RuntimeError("spoiled")
        ck.step(step, state)
        ck.wait()
np.save("end.npy", state["a"])
"""


@pytest.mark.parametrize(("spoiled", "failing_step", "varies", "restored"), [
    (9, 10, 4, "-1 9 9 4"), (22, 31, 3, "-1 29 29 24 24 19"), (22, 31, 1, "-1 29 29 24 19"),
])  # fmt: skip
def test_an_older_step_is_loaded_where_newer_whole_ones_fail_the_job(
    tmp_path: Path, spoiled: int, failing_step: int, varies: int, restored: str
) -> None:
    """The state in these steps makes the job fail a few steps later, always at the same step or at varying ones: after two
    failures an older step is loaded, and an even older one where that one is bad, too."""
    program = ROTTEN.replace("SPOILED", str(spoiled)).replace("PLACE", f"{failing_step} + attempt % {varies}")
    command = [sys.executable, "-m", "ckpt.tools.run", "--cold", "--run-dir", "run", "--", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "restored").read_text().split() == restored.split()
    newest = restored.split()[1]
    blame = "it failed 3 times at the same place" if varies == 1 else "it failed twice soon after it"
    assert f"from a step before {newest}, which may be the reason: {blame}" in done.stderr
    assert np.load(tmp_path / "end.npy").tolist() == [50.0] * 3
