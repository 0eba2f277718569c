"""The orphan guard, a real process: it ends the ranks of an agent that has ended, and is started again if it has ended."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.processes import stop, until
from helpers.unread_pipe import full_pipe

from ckpt.recovery.ranks import orphan_guard
from ckpt.recovery.ranks.orphan_guard import OrphanGuard

MARK = f"CKPT_TEST_ORPHAN_GUARD={os.getpid()}"  # a guard ends all processes with its mark, those of other workers of pytest too


def start_rank() -> subprocess.Popen[bytes]:
    name, _, value = MARK.partition("=")
    return subprocess.Popen(["sleep", "1000"], start_new_session=True, env=os.environ | {name: value})


@pytest.fixture(name="rank")
def fixture_rank() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with a session of its own and the mark of a rank."""
    rank = start_rank()
    yield rank
    with suppress(ProcessLookupError):
        rank.kill()
    rank.wait()


def test_files_of_the_working_directory_do_not_stop_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: subprocess.Popen[bytes]
) -> None:
    """A user may start ckpt-run in a folder that has a file with the name of a module."""
    for name in ("ckpt.py", "signal.py", "queue.py"):
        (tmp_path / name).write_text("raise SystemExit('this is not the module')\n")
    monkeypatch.chdir(tmp_path)
    pages = tmp_path / "pages"
    pages.mkdir()
    guard = OrphanGuard(MARK, pages)
    guard.add(rank.pid)
    guard.close()
    assert rank.wait(300) == -signal.SIGKILL
    assert not pages.exists()


def test_a_guard_that_cannot_run_takes_no_more_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent asks for it twice a second. It is started again, more and more rarely, and the log says so."""
    monkeypatch.setattr(orphan_guard, "_FIRST_PAUSE_SECONDS", 0.0)
    guard = OrphanGuard(MARK, tmp_path / "pages")
    try:
        guard._command = ["false"]
        guard._process.kill()
        guard._process.wait()
        before = len(os.listdir("/proc/self/fd"))
        with caplog.at_level(logging.WARNING, "ckpt"):
            for _ in range(20):
                guard.ensure_running()
                guard._process.wait()
        assert len(os.listdir("/proc/self/fd")) <= before
        assert "the guard that ends the ranks of a killed ckpt-run has ended" in caplog.text
    finally:
        guard.close()


def test_a_guard_that_was_killed_is_started_again_and_knows_the_ranks(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    guard = OrphanGuard(MARK, tmp_path / "pages")
    guard.add(rank.pid)
    guard._process.kill()
    guard._process.wait()
    guard.ensure_running()
    guard.close()
    assert rank.wait(300) == -signal.SIGKILL


def test_a_stopped_guard_blocks_no_agent(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    """Its pipe becomes full after hours of heartbeats. Another guard then takes its place."""
    guard = OrphanGuard(MARK, tmp_path / "pages")
    first = guard._process
    stop(first.pid)
    guard.add(rank.pid)
    for _ in range(1 << 16):
        guard.send_heartbeat()
    until(lambda: first.poll() is not None, "the stopped guard is killed")
    guard.ensure_running()
    assert guard._process is not first
    guard.close()
    assert rank.wait(300) == -signal.SIGKILL


def test_the_guard_ends_later_ranks_although_nobody_reads_its_message(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    """It reports that the agent was stopped. Later, the agent continues with other ranks and is killed."""
    command = [sys.executable, "-P", "-m", "ckpt.recovery.ranks.orphan_guard", MARK, str(tmp_path / "pages"), "0.5"]
    with full_pipe() as (_, unread), subprocess.Popen(command, stdin=subprocess.PIPE, stderr=unread) as guard:
        assert guard.stdin is not None
        os.write(guard.stdin.fileno(), f"+{rank.pid}\n".encode())
        assert rank.wait(300) == -signal.SIGKILL
        later = start_rank()
        try:
            guard.stdin.close()
            assert later.wait(300) == -signal.SIGKILL
        finally:
            later.kill()
            guard.kill()


@pytest.mark.slow
def test_the_guard_ends_no_rank_before_the_first_heartbeat(tmp_path: Path, rank: subprocess.Popen[bytes]) -> None:
    """An agent may take long to join a run. The guard could find its first ranks before it reads their sessions."""
    guard = OrphanGuard(MARK, tmp_path / "pages", lost_seconds=0.1)
    time.sleep(3.0)  # the guard looks twice a second
    assert rank.poll() is None
    guard.send_heartbeat()
    assert rank.wait(300) == -signal.SIGKILL
    guard.close()


def test_the_guard_reports_each_loss(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "ckpt.recovery.ranks.orphan_guard", MARK, str(tmp_path / "pages"), "0.5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as guard:
        assert guard.stdin is not None
        assert guard.stderr is not None
        for _ in range(2):
            rank = start_rank()
            os.write(guard.stdin.fileno(), f"+{rank.pid}\n".encode())
            assert rank.wait(300) == -signal.SIGKILL
            # On a busy machine the guard looks later, and reports the longer time.
            assert re.search(rb"was stopped or hung for [1-9]\d* s, so its ranks are ended", guard.stderr.readline())
        guard.stdin.close()
