"""Ends processes of this host: kills those of a session or with a mark, and reaps orphans."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable

from ckpt.recovery.ranks.processes import find_processes

log = logging.getLogger("ckpt.run")

_RETRY_SECONDS = 0.1
_KILLED_SECONDS = 5.0
"""How long a killed child is awaited. The agent must report to the run log meanwhile, and its loop waits here."""
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends, in whatever way."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def kill_sessions(sessions: Iterable[int], mark: str = "", spared_sessions: Iterable[int] = ()) -> None:
    """Kill all processes of some sessions, and those with a mark, and wait until they have ended. Stopped processes end, too.

    After 200 passes it returns in any case, because a process that hangs in the kernel does not end.

    sessions: the process ids of their leaders, as of setsid(2).
    mark: NAME=value in the environment of the processes; "" none.
    spared_sessions: their processes are not killed although they have the mark.
    """
    session_ids, spared = list(sessions), list(spared_sessions)
    kill_process_groups(session_ids)  # this reaches most at once; the loop finds those that have left their group
    for _ in range(200):  # a process that is just being started is found in the next pass
        try:
            remaining = find_processes(session_ids, mark, spared)
        except OSError as error:  # e.g. too many open files: nothing is known about them
            log.warning("the processes of this host can't be listed, and are listed again: %s", error)
            time.sleep(_RETRY_SECONDS)
            continue
        if not remaining:
            return
        for pid in remaining:
            _send_signal(pid, signal.SIGKILL)
        reap_orphans()
        time.sleep(0.005)


def kill_process_groups(sessions: Iterable[int]) -> None:
    """Kill the leaders of some sessions with their process groups. Does not wait."""
    for leader in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def wait_for_killed(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a child that was killed, for some seconds at most.

    A child that hangs in the kernel, or that a debugger traces, does not end before that does. Then a warning names it.
    """
    try:
        process.wait(_KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning(
            "process %d was killed and has not ended for %g s: it hangs in the kernel, or a debugger traces it; end the "
            "debugger, or restart this host",
            process.pid, _KILLED_SECONDS,
        )  # fmt: skip


def reap_orphans() -> None:
    """Reap orphans that have ended, but not registered children, for whose exit other code waits."""
    for pid in _orphans():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


_registered_children: set[int] = set()
"""The process ids of children for which other code waits. They stay after the child has ended. So if the kernel gives such an
id to an orphan, the orphan is not reaped. Only the main thread uses the set."""


def register_child(pid: int) -> None:
    """Exclude a child from `reap_orphans`, because other code waits for it."""
    _registered_children.add(pid)


def _orphans() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split() if int(pid) not in _registered_children]
    except OSError:
        return []


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
