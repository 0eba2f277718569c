"""An agent whose loop hangs: its host counts as lost, and its ranks end before the job starts again without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import host_runs
from helpers.host_runs import ENGINES, Job, assert_result, starts
from helpers.host_runs import job as job
from helpers.processes import until
from helpers.runs import have_ended

HUNG_SECONDS = 4.0
RUN = f"""
import sys
from ckpt.recovery.agent import loop_watch
loop_watch.HUNG_SECONDS = {HUNG_SECONDS}
from ckpt.tools.run import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def fixture_short_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_runs, "RUN", [sys.executable, "-c", RUN])


def _hang_next_launch(run: Job, host: str, attempt: int, rank: int) -> Path:
    """Make the agent of a host hang while it opens the log of a rank: nobody reads the pipe that has its name."""
    logs = run.folder / ("run" if not run.state else f"run-{host}") / "logs" / str(attempt)
    logs.mkdir(parents=True)
    os.mkfifo(logs / f"rank-{rank}.log")
    return logs / f"rank-{rank}.log"


@ENGINES
def test_the_others_continue_without_a_host_whose_agent_hangs(job: Callable[..., Job]) -> None:
    """It hangs between the starts of its two ranks. When it runs again, it ends both of them, and is a spare."""
    run = job("--min", "2", steps=150)
    for name in "abc":
        run.start(name)
    run.until_step(12)
    hosts = starts(run.log())[0]
    victim = hosts[1]
    pipe = _hang_next_launch(run, victim, 1, 3)
    before = run.pid(2)
    os.kill(run.pid(5), 9)
    run.until(lambda log: len(starts(log)) == 2, "the second attempt")
    until(lambda: run.pid(2) != before, "the first rank of the host runs")
    pids = [run.pid(2)]
    run.until(lambda log: len(starts(log)) == 3, "the others continue")
    assert have_ended(pids), "no rank of the hung agent runs"
    run.until_step(20, attempt=2)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        until(lambda: f"without {victim} (gone)" in run.messages(victim), "the agent runs again")
        assert set(run.ends(*"abc").values()) == {0}
    finally:
        os.close(reader)
    log = run.log()
    assert [(e.facts["cause"], e.facts["host"]) for e in log if e.kind == "failure"][-1] == ("lost", victim)
    assert victim not in starts(log)[-1]
    assert len(starts(log)) == 3
    assert "the loop of this agent hangs in" in run.messages(victim)
    assert not list(run.folder.glob("at-1-*")), "no rank of the attempt before did a step"
    assert_result(run, 4)
