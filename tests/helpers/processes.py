"""Python processes of tests: started, awaited, and forked by a server that kills them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.folders import PROGRAMS, TESTS

SOAK = os.environ.get("CKPT_SOAK") == "1"


def python_path() -> str:
    """Return PYTHONPATH with the tests before what it has."""
    return os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    """Return a port on loopback that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def python(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    """Start a Python process that runs `code` with the tests on its path and text pipes."""
    env = {**os.environ, "PYTHONPATH": python_path(), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float = 600) -> str:
    """Wait until a process ends with status 0; return what it printed."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    """Wait until a process has stopped itself (SIGSTOP) at a fail point; its end is an error."""
    found = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED, f"it ended before it stopped: {process.communicate()[1]}"


def stop(pid: int) -> None:
    """Send SIGSTOP, and return once every thread of the process is stopped, or the process has ended.

    On a busy machine a thread may run on for a while: the signal takes effect when the thread that gets it runs.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not set(_thread_states(pid)) - set("TtZX"), f"process {pid} is stopped")


def _thread_states(pid: int) -> list[str]:
    """Return the states of the threads of a process, as in proc(5); none if it has ended."""
    states = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states


class Killer:
    """A server that has imported ckpt and forks a saving child for each job, which it may kill. See kill_server.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "kill_server.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip

    def run(self, **job: Any) -> dict[str, Any]:
        """Run one job; the answer has `acknowledged` (steps), `killed` (bool) and `error` (text, "" if there is none)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(600)
        self._process.stdout.close()


def until(true: Callable[[], object], what: str = "") -> None:
    """Wait at most 600 s for a condition that other processes or threads make true. what: names it in the error."""
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline, f"within 600 s this did not happen: {what or true}"
        time.sleep(0.01)
