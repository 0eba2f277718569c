"""Signals and ends of ranks, of the fork server and of the agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.fork_servers import Starter, have_ended, script, surroundings, write_packages
from helpers.fork_servers import start_fork_server as start_fork_server
from helpers.processes import python, stop

from ckpt.recovery.ranks import process_kill, processes
from ckpt.recovery.ranks.fork_client import ForkedRank, ForkServers
from ckpt.recovery.ranks.orphan_guard import OrphanGuard

if sys.platform != "linux":
    pytest.skip("needs Linux: a fork server gives its children to another process", allow_module_level=True)


SLEEPS = "import time\nprint('here', flush=True)\ntime.sleep(3600)\n"


def contains_soon(log: Path, text: str) -> bool:
    """Return whether the log contains this text within a minute."""
    deadline = time.monotonic() + 600
    while text not in (log.read_text() if log.exists() else ""):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_forked_ranks_get_signals_and_report_their_status(start_fork_server: Starter, tmp_path: Path) -> None:
    fork_server = start_fork_server([sys.executable, script(tmp_path, SLEEPS)])
    ranks = [fork_server.fork(surroundings(n), tmp_path / f"log-{n}") for n in range(2)]
    assert all(contains_soon(tmp_path / f"log-{n}", "here") for n in range(2))
    first, second = [rank for rank in ranks if rank]
    assert (first.poll(), second.poll()) == (None, None)
    assert os.getsid(first.pid) == first.pid
    descriptor = os.pidfd_open(first.pid)
    os.kill(first.pid, signal.SIGSEGV)
    assert first.wait() == -signal.SIGSEGV
    assert first.poll() == -signal.SIGSEGV
    os.close(descriptor)
    fork_server.close()
    assert have_ended(fork_server.pid)
    assert second.poll() is None, "a rank has ended with the fork server"
    process_kill.kill_sessions([second.pid])
    assert second.wait() == -signal.SIGKILL


@pytest.mark.parametrize("report", [b"{", b"[]", b'{"modules": ["os"]}', b"\xff\xfe"])
def test_a_list_of_imports_that_is_malformed_leaves_the_next_start_cold(tmp_path: Path, report: bytes) -> None:
    imports = tmp_path / "page.imports"
    imports.write_bytes(report)
    servers = ForkServers([sys.executable, script(tmp_path, SLEEPS)])
    servers.update(surroundings(0), imports)
    assert servers.status_text.startswith("no warm start yet")
    assert servers.fork(surroundings(0), tmp_path / "log") is None
    imports.write_text('{"modules": {}, "environ": {}}')
    os.utime(imports, (5, 5))
    deadline = time.monotonic() + 600
    while servers.status_text != "the next start is warm":
        assert time.monotonic() < deadline, servers.status_text
        servers.update(surroundings(0), imports)
        time.sleep(0.01)
    servers.close()


TRACES = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
print(libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None), flush=True)
time.sleep(3600)
"""
"""Traces a process as a debugger does. A traced process that is killed does not end before its tracer."""


def test_a_fork_server_that_does_not_end_when_it_is_killed_is_left(
    start_fork_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_kill, "_KILLED_SECONDS", 0.5)
    fork_server = start_fork_server([sys.executable, script(tmp_path, SLEEPS)])
    pid = fork_server.pid
    with python(TRACES, pid) as tracer:
        try:
            assert tracer.stdout is not None
            if tracer.stdout.readline() != "0\n":
                pytest.skip("this user can't trace its processes")
            fork_server.close()
            assert f"process {pid} was killed and has not ended for 0.5 s" in caplog.text
        finally:
            tracer.kill()


FORKS_A_DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    print("daemon", os.getpid(), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("ended_by", ["agent", "guard"])
def test_a_process_that_left_the_session_of_a_forked_rank_ends_with_it(
    start_fork_server: Starter, tmp_path: Path, ended_by: str
) -> None:
    """It runs no other program, so that its environment in /proc is that of the fork server, which continues."""
    mark = {"CKPT_AGENT": f"{os.getpid()}-{ended_by}"}
    fork_server = start_fork_server([sys.executable, script(tmp_path, FORKS_A_DAEMON)], **mark)
    log = tmp_path / "log"
    rank = fork_server.fork(surroundings(**mark), log)
    assert rank is not None, fork_server.reason
    assert contains_soon(log, "daemon")
    daemon = int(log.read_text().split()[1])
    assert os.getsid(daemon) == daemon
    mark_text = f"CKPT_AGENT={mark['CKPT_AGENT']}"
    try:
        if ended_by == "agent":
            assert fork_server.pid is not None
            process_kill.kill_sessions([rank.pid], mark_text, [fork_server.pid])
            assert fork_server.is_ready, "the fork server was ended, too"
        else:
            guard = OrphanGuard(mark_text, tmp_path / "pages")
            guard.add(rank.pid)
            guard.close()
        assert processes.process_state(daemon) in ("", "Z")
        assert rank.wait() == -signal.SIGKILL
    finally:
        process_kill.kill_sessions([daemon, rank.pid])


def test_a_rank_that_another_process_reaped_counts_as_failed() -> None:
    child = subprocess.Popen(["true"])
    rank = ForkedRank(child.pid)
    child.wait()
    assert rank.poll() == 255


def test_ranks_continue_after_the_fork_server_is_killed(start_fork_server: Starter, tmp_path: Path) -> None:
    """Later ranks are started cold."""
    fork_server = start_fork_server([sys.executable, script(tmp_path, SLEEPS)])
    rank = fork_server.fork(surroundings(), tmp_path / "log")
    assert rank is not None
    assert fork_server.pid is not None
    os.kill(fork_server.pid, signal.SIGKILL)
    assert have_ended(fork_server.pid)
    assert contains_soon(tmp_path / "log", "here")
    assert not fork_server.is_ready
    assert fork_server.fork(surroundings(), tmp_path / "other") is None
    assert "the process has ended" in fork_server.reason
    assert rank.poll() is None
    process_kill.kill_sessions([rank.pid])
    assert rank.wait() == -signal.SIGKILL


def test_a_stopped_fork_server_is_given_up(start_fork_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits for it forever, and its pending fork does not run later."""
    monkeypatch.setattr("ckpt.recovery.ranks.fork_client._FORK_SECONDS", 0.2)
    fork_server = start_fork_server([sys.executable, script(tmp_path, SLEEPS)])
    assert fork_server.pid is not None
    stop(fork_server.pid)
    assert fork_server.fork(surroundings(), tmp_path / "log") is None
    assert fork_server.reason == "it has not answered for 0.2 s"
    assert have_ended(fork_server.pid)
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("word", [b"", b"x"])
def test_a_forked_rank_begins_only_after_the_agent_has_its_number(
    start_fork_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    """So no rank runs whose process number was lost."""
    fork_server = start_fork_server([sys.executable, script(tmp_path, SLEEPS)])
    monkeypatch.setattr("ckpt.recovery.ranks.fork_server.GO_BYTE", word)
    rank = fork_server.fork(surroundings(), tmp_path / "log")
    assert rank is not None
    assert rank.wait() == 1
    assert (tmp_path / "log").read_text() == ""


def test_a_rank_with_an_unwritable_log_is_not_forked(start_fork_server: Starter, tmp_path: Path) -> None:
    fork_server = start_fork_server([sys.executable, script(tmp_path, SLEEPS)])
    with pytest.raises(FileNotFoundError):
        fork_server.fork(surroundings(), tmp_path / "none" / "log")
    with pytest.raises(IsADirectoryError):
        fork_server.fork(surroundings(), tmp_path)
    for _ in range(20):  # it can be ended from its first moment
        rank = fork_server.fork(surroundings(), tmp_path / "log")
        assert rank is not None, fork_server.reason
        process_kill.kill_sessions([rank.pid])
        assert rank.wait() == -signal.SIGKILL


AGENT = """
    import json, os, sys, time
    from pathlib import Path
    from ckpt.recovery.ranks.fork_client import ForkServerClient

    folder = Path(sys.argv[1])
    fork_server = ForkServerClient.start([sys.executable, str(folder / "train.py")], os.environ, folder / "rank.imports")
    while sys.argv[2] == "ranks" and not fork_server.is_ready:
        assert not fork_server.reason, fork_server.reason
        time.sleep(0.01)
    ranks = [fork_server.fork({**os.environ, "RANK": str(n)}, folder / f"log-{n}") for n in range(2) if fork_server.is_ready]
    (folder / "pids.new").write_text(json.dumps([fork_server.pid, *[rank.pid for rank in ranks]]))
    (folder / "pids.new").rename(folder / "pids")
    time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["ranks", "importing"])
def test_a_killed_agent_leaves_no_rank_and_no_fork_server(tmp_path: Path, when: str) -> None:
    """This also holds where an import hangs with the interpreter locked."""
    site = write_packages(tmp_path, slow="import ctypes\nctypes.PyDLL(None).sleep(3600)\n")
    script(tmp_path, SLEEPS)
    reported = {"slow": str(site / "slow" / "__init__.py")} if when == "importing" else {}
    (tmp_path / "rank.imports").write_text(json.dumps({"modules": reported, "environ": {}}))
    command = [sys.executable, script(tmp_path, AGENT, "agent.py"), str(tmp_path), when]
    agent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(site)})
    try:
        assert contains_soon(tmp_path / "pids", "]")
        pids = json.loads((tmp_path / "pids").read_text())
        assert len(pids) == (3 if when == "ranks" else 1)
        assert all(contains_soon(tmp_path / f"log-{n}", "here") for n in range(len(pids) - 1))
        assert all(processes.process_state(pid) for pid in pids)
    finally:
        agent.kill()
        agent.wait()
    assert have_ended(*pids)
