"""ckpt-run is asked to end, is stopped or killed: it leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.processes import stop, until
from helpers.runs import RANKS, Run, assert_result, have_ended
from helpers.runs import start as start

import ckpt
from ckpt.recovery.ranks import processes


@pytest.mark.parametrize("storm", [1, 3])
def test_a_run_asked_to_end_saves_its_present_step(start: Callable[..., Run], storm: int) -> None:
    """Started again it continues from that step, and no step is lost."""
    run = start()
    run.until_step(13)
    until(lambda: (run.folder / "repo").is_dir() and ckpt.open(run.folder / "repo").newest()[1] >= 9)
    run.process.send_signal(signal.SIGTERM)
    if storm > 1:  # after a second signal ckpt-run does not wait for a save
        for _ in range(storm):
            time.sleep(0.01)
            run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.messages
    steps = ckpt.open(run.folder / "repo").steps()
    assert steps[-1] >= (13 if storm == 1 else 9)
    assert storm > 1 or "have saved and ended on SIGTERM" in run.messages
    again = start()
    assert again.end() == 0, again.messages
    assert_result(again)
    assert [e["attempt"] for e in again.record() if e["kind"] == "start"] == [0, 1]


def test_a_frozen_and_thawed_host_has_no_hang(start: Callable[..., Run]) -> None:
    """ckpt-run and all ranks are stopped together, as on a host that is frozen and thawed."""
    run = start("--hang", "2", "--cold", seconds=0.1)
    run.until_step(12)
    pids = [run.process.pid, *(run.pid(rank) for rank in range(RANKS))]
    for pid in pids:
        stop(pid)
    time.sleep(4)
    for pid in pids:  # ckpt-run first, so that it polls the ranks before their next heartbeat
        os.kill(pid, signal.SIGCONT)
    assert run.end() == 0, run.messages
    assert_result(run)
    assert run.failures() == []


def test_ranks_that_do_not_use_ckpt_get_sigterm_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'saved').write_text('yes'), sys.exit(0)))\n"
        "(folder / 'ready').touch()\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--", sys.executable, str(program)]
    run = subprocess.Popen([*command, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    _, stderr = run.communicate(timeout=600)
    assert run.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "saved").read_text() == "yes"
    assert "rank 0 was ended by SIGTERM, with no Checkpointer opened, before the first step" in stderr


def test_a_run_survives_a_full_console_and_a_hangup(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), "--"]
    program = ["sh", "-c", "echo much; sleep 1; touch $0", str(tmp_path / "done")]
    with open("/dev/full", "wb") as full:
        run = subprocess.Popen([*command, *program], stdout=full, stderr=full)
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("run/logs/0/rank-0.log")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGHUP)
    assert run.wait(600) == 0
    assert (tmp_path / "done").exists()


def test_a_killed_ckpt_run_leaves_no_process(start: Callable[..., Run]) -> None:
    """This holds for the children of a rank, too."""
    run = start(steps=10_000, fault=("child", 0, 1))
    run.until_step(3)
    pids = [run.pid(rank) for rank in range(RANKS)] + [int((run.folder / "child").read_text())]
    assert all(processes.process_state(pid) for pid in pids)
    run.process.kill()
    run.process.wait()
    assert have_ended(pids)
    again = start(steps=40)
    assert again.end() == 0, again.messages
    assert sum(processes.process_state(pid) not in ("", "Z") for pid in pids) == 0


def test_a_killed_orphan_guard_is_replaced(start: Callable[..., Run]) -> None:
    """When ckpt-run is killed afterwards, the new guard ends the processes that the ranks have started."""
    run = start(steps=10_000, fault=("child", 0, 1))
    run.until_step(12)
    (pages,) = [Path(e["facts"]["pages"]) for e in run.record() if e["kind"] == "start"]

    def orphan_guards() -> list[int]:
        words = [b"ckpt.recovery.ranks.orphan_guard", os.fsencode(pages)]
        found = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if has_words(p, words)]
        return [pid for pid in found if processes.process_state(pid) not in ("", "Z")]

    (first,) = orphan_guards()
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 600
    while first in orphan_guards() or not orphan_guards():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [*(run.pid(rank) for rank in range(RANKS)), int((run.folder / "child").read_text())]
    run.close()
    assert have_ended(pids)
    while pages.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_words(file: Path, words: list[bytes]) -> bool:
    """Return whether a command line contains all of these words."""
    with contextlib.suppress(OSError):
        return set(words) <= set(file.read_bytes().split(b"\0"))
    return False


def test_children_of_a_killed_rank_end_with_it(start: Callable[..., Run]) -> None:
    run = start(fault=("child", 0, 1))
    run.until_step(3)
    child = int((run.folder / "child").read_text())
    os.kill(run.pid(0), signal.SIGKILL)
    run.until_step(8, attempt=1)
    assert processes.process_state(child) in ("", "Z")
    assert run.end() == 0, run.messages
    assert_result(run)
