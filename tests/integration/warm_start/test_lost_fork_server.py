"""Signals and the end of ranks, of the fork server and of the agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.fork_servers import Starter, gone, libraries, script, surroundings
from helpers.fork_servers import begin as begin

from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.fork_client import ForkedRank

if sys.platform != "linux":
    pytest.skip("needs Linux: a forge hands its children to another process", allow_module_level=True)


SLEEPS = "import time\nprint('here', flush=True)\ntime.sleep(3600)\n"


def says(log: Path, text: str) -> bool:
    until = time.monotonic() + 60
    while text not in (log.read_text() if log.exists() else ""):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_signals_and_statuses(begin: Starter, tmp_path: Path) -> None:
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    ranks = [forge.fork(surroundings(n), tmp_path / f"log-{n}") for n in range(2)]
    assert all(says(tmp_path / f"log-{n}", "here") for n in range(2))
    first, second = [rank for rank in ranks if rank]
    assert (first.poll(), second.poll()) == (None, None)
    assert os.getsid(first.pid) == first.pid
    descriptor = os.pidfd_open(first.pid)
    os.kill(first.pid, signal.SIGSEGV)
    assert first.wait() == -signal.SIGSEGV
    assert first.poll() == -signal.SIGSEGV
    os.close(descriptor)
    forge.close()
    assert gone(forge.pid)
    assert second.poll() is None, "the ranks go on without it"
    processes.kill_sessions([second.pid])
    assert second.wait() == -signal.SIGKILL


def test_an_exit_that_somebody_else_heard_of() -> None:
    child = subprocess.Popen(["true"])
    rank = ForkedRank(child.pid)
    child.wait()
    assert rank.poll() == 255


def test_the_forge_is_killed(begin: Starter, tmp_path: Path) -> None:
    """The ranks go on; what comes next is started cold."""
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    rank = forge.fork(surroundings(), tmp_path / "log")
    assert rank is not None
    assert forge.pid is not None
    os.kill(forge.pid, signal.SIGKILL)
    assert gone(forge.pid)
    assert says(tmp_path / "log", "here")
    assert not forge.is_ready
    assert forge.fork(surroundings(), tmp_path / "other") is None
    assert "the process has ended" in forge.reason
    assert rank.poll() is None
    processes.kill_sessions([rank.pid])
    assert rank.wait() == -signal.SIGKILL


def test_the_forge_is_stopped(begin: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever, and what it was asked for does not run later."""
    monkeypatch.setattr("ckpt.recovery.ranks.fork_client._FORK_SECONDS", 0.2)
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    assert forge.pid is not None
    os.kill(forge.pid, signal.SIGSTOP)
    assert forge.fork(surroundings(), tmp_path / "log") is None
    assert forge.reason == "it has not answered for 0.2 s"
    assert gone(forge.pid)
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("word", [b"", b"x"])
def test_a_rank_begins_only_when_it_is_told_to(
    begin: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    """So none runs whose number was lost on the way."""
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    monkeypatch.setattr("ckpt.recovery.ranks.fork_server.GO_BYTE", word)
    rank = forge.fork(surroundings(), tmp_path / "log")
    assert rank is not None
    assert rank.wait() == 1
    assert (tmp_path / "log").read_text() == ""


def test_a_log_that_cannot_be_written_and_one_that_can(begin: Starter, tmp_path: Path) -> None:
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    with pytest.raises(FileNotFoundError):
        forge.fork(surroundings(), tmp_path / "none" / "log")
    with pytest.raises(IsADirectoryError):
        forge.fork(surroundings(), tmp_path)
    for _ in range(20):  # it can be ended from the first moment on
        rank = forge.fork(surroundings(), tmp_path / "log")
        assert rank is not None, forge.reason
        processes.kill_sessions([rank.pid])
        assert rank.wait() == -signal.SIGKILL


AGENT = """
    import json, os, sys, time
    from pathlib import Path
    from ckpt.recovery.ranks.fork_client import ForkServerClient

    folder = Path(sys.argv[1])
    forge = ForkServerClient.start([sys.executable, str(folder / "train.py")], os.environ, folder / "told.imports")
    while sys.argv[2] == "ranks" and not forge.is_ready:
        assert not forge.reason, forge.reason
        time.sleep(0.01)
    ranks = [forge.fork({**os.environ, "RANK": str(n)}, folder / f"log-{n}") for n in range(2) if forge.is_ready]
    (folder / "pids.new").write_text(json.dumps([forge.pid, *[rank.pid for rank in ranks]]))
    (folder / "pids.new").rename(folder / "pids")
    time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["ranks", "importing"])
def test_the_agent_is_killed(tmp_path: Path, when: str) -> None:
    """Nothing goes on: neither the ranks, nor the forge, not even where an import hangs with the interpreter locked."""
    site = libraries(tmp_path, slow="import ctypes\nctypes.PyDLL(None).sleep(3600)\n")
    script(tmp_path, SLEEPS)
    told = {"slow": str(site / "slow" / "__init__.py")} if when == "importing" else {}
    (tmp_path / "told.imports").write_text(json.dumps({"modules": told, "environ": {}}))
    command = [sys.executable, script(tmp_path, AGENT, "agent.py"), str(tmp_path), when]
    agent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(site)})
    try:
        assert says(tmp_path / "pids", "]")
        pids = json.loads((tmp_path / "pids").read_text())
        assert len(pids) == (3 if when == "ranks" else 1)
        assert all(says(tmp_path / f"log-{n}", "here") for n in range(len(pids) - 1))
        assert all(processes.process_state(pid) for pid in pids)
    finally:
        agent.kill()
        agent.wait()
    assert gone(*pids)
