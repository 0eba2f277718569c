"""The memory tier of a run on one host: no step in it is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.runs import RANKS, Run, assert_result, have_ended, kill_ranks, memory_folder_of
from helpers.runs import start as start

import ckpt
from ckpt.recovery.ranks.launch import free_port, start_ranks
from ckpt.recovery.ranks.rank_environment import LaunchSpec
from ckpt.recovery.ranks.stop_ranks import stop_ranks


def test_the_next_attempt_reuses_the_pages_when_memory_is_full(tmp_path: Path) -> None:
    """Another process fills the memory after the first attempt has begun: the next one has the room of the pages of the
    first."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    pages = tmp_path / "pages"
    pages.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(pages)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        for attempt in range(3):
            share = LaunchSpec("r", attempt, 0, 2, 2, 0, "127.0.0.1", 1, {})
            ranks = start_ranks(["true"], share, pages, tmp_path / "logs")
            stop_ranks(ranks, "")
            with contextlib.suppress(OSError), open(pages / "others", "ab", buffering=0) as other:
                while True:
                    other.write(bytes(4096))
        assert sorted(page.name for page in pages.iterdir()) == ["2-0", "2-1", "others"]
    finally:
        subprocess.run(["umount", str(pages)], check=True)


@pytest.fixture
def tiered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_TIER", "1")


def test_status_and_metrics_show_the_bytes_in_memory(start: Callable[..., Run], tiered: None) -> None:
    """They count the steps that are kept, and one that is being saved."""
    port = free_port("127.0.0.1")
    run = start("--metrics", f"127.0.0.1:{port}", steps=10_000, seconds=0.1)
    memory_folder_of(run)
    run.until_step(12)
    until, status = time.monotonic() + 600, ""
    while "of the memory of" not in status and time.monotonic() < until:
        command = [sys.executable, "-m", "ckpt.tools.run", "status", "--run-dir", str(run.files)]
        status = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert re.search(r"^steps take 0\.\d{3} GB of the memory of ", status, re.MULTILINE), status
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = re.search(r"^ckpt_run_memory_bytes (\d+)$", metrics, re.MULTILINE)
    assert found, metrics
    assert 0 < int(found[1]) < 1_000_000
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.messages


def test_no_step_in_memory_is_lost_when_all_ranks_are_killed(start: Callable[..., Run], tiered: None) -> None:
    """At most the step under way, and the step before it, whose save may still run, are repeated."""
    run = start(seconds=0.1)
    memory_folder_of(run)
    run.until_step(12)
    kill_ranks(run)
    assert run.end() == 0, run.messages
    assert_result(run)
    (failure,) = [e for e in run.record() if e["kind"] == "failure"]
    assert failure["facts"]["step"] >= 12
    assert failure["facts"]["committed"] >= failure["facts"]["step"] - 2
    assert ckpt.open(run.folder / "repo").steps()[-1] == 39
    assert not [p for p in memory_folder_of(run).rglob("*") if p.is_file()], "a file is left in memory"


def test_a_job_that_is_given_up_drains_its_memory(start: Callable[..., Run], tiered: None) -> None:
    """No rank can copy steps any more when the job is given up."""
    run = start("--restarts", "0", seconds=0.1)
    memory_folder_of(run)
    run.until_step(12)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 1, run.messages
    assert re.search(r"step \d+ was brought from file:///dev/shm/\S+ to file://", run.messages), run.messages
    assert ckpt.open(run.folder / "repo").steps()[-1] >= 11
    assert run.record()[-1]["kind"] == "note"
    assert not [p for p in memory_folder_of(run).rglob("*") if p.is_file()]
    again = start()
    assert again.end() == 0, again.messages
    assert_result(again)


def test_a_restarted_ckpt_run_finds_the_steps_in_memory(start: Callable[..., Run], tiered: None) -> None:
    run = start(seconds=0.1)
    memory_folder_of(run)
    run.until_step(12)
    pids = [run.pid(rank) for rank in range(RANKS)]
    run.process.kill()
    run.process.wait()
    assert have_ended(pids)
    again = start()
    assert again.end() == 0, again.messages
    assert_result(again)
    assert min(int(line) for line in (run.folder / "begun").read_text().split()[RANKS:]) >= 12
