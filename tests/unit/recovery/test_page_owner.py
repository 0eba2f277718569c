"""Signals to a rank reach no other process that got the number of the rank after its end."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.agent_worlds import agent
from helpers.processes import python

from ckpt.recovery.ranks import rank_stacks
from ckpt.recovery.ranks.rank_process import NO_DESCRIPTOR, RankProcess
from ckpt.storage.base.errors import CkptError
from ckpt.tools import run_queries
from ckpt.training.heartbeat_page import _PID, HeartbeatPage

RANK = """
import os, sys
os.environ["CKPT_PULSE"] = sys.argv[1]
from ckpt.training import heartbeat_page
heartbeat_page.own_page()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="page")
def fixture_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the heartbeat page of rank 0 of a living agent."""
    report = replace(agent("a"), pages=str(tmp_path), attempt=0)
    monkeypatch.setattr(run_queries, "_living_agents", lambda *_: {"a": report})
    monkeypatch.setattr(run_queries, "_is_access_denied", lambda _: False)
    HeartbeatPage(tmp_path / "0-0", new=True)
    return tmp_path / "0-0"


@pytest.fixture(name="other")
def fixture_other(page: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that is not a rank and whose number is in the page."""
    with subprocess.Popen(["sleep", "1000"]) as other:
        HeartbeatPage(page)._fields[_PID] = other.pid
        yield other
        other.kill()


def _inject(folder: Path) -> None:
    arguments = ["kill", "--rank", "0", "--run-dir", str(folder)]
    CliRunner().invoke(run_queries.inject, arguments, catch_exceptions=False, standalone_mode=False)


def test_a_rank_gets_the_signal(page: Path) -> None:
    with python(RANK, page) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
            _inject(page.parent)
            assert rank.wait(300) == -signal.SIGKILL
        finally:
            rank.kill()


def test_a_process_with_the_number_of_an_ended_rank_gets_no_signal(page: Path, other: subprocess.Popen[bytes]) -> None:
    with pytest.raises(CkptError, match=f"rank 0, process {other.pid}, has just ended; try again after its restart"):
        _inject(page.parent)
    assert other.poll() is None


def test_the_stacks_of_an_ended_rank_of_mpiexec_are_not_requested_from_another_process(
    page: Path, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_stacks, "_find_py_spy", lambda: None)
    with subprocess.Popen(["true"]) as mpiexec:
        heartbeat_page = HeartbeatPage(page)
        rank = RankProcess(0, mpiexec, NO_DESCRIPTOR, heartbeat_page, page.parent / "log", is_shared=True)
        rank_stacks.save_stacks([rank], {0: heartbeat_page.read()})
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
