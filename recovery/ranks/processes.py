"""Functions for processes of this host: find those of a session or with a mark, kill them, reap orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator

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


def process_state(pid: int) -> str:
    """Return the state of a process from /proc: R, S, D, T (stopped), Z …; "" if it does not exist."""
    return (_stat_fields(pid) or [""])[0]


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, group, session …; empty if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def find_processes(sessions: Iterable[int], mark: str = "") -> list[int]:
    """Return all living processes of some sessions, and those with `mark` (NAME=value) in their environment.

    A descendant that has left its session still has the mark.
    """
    session_ids, encoded_mark = {str(session) for session in sessions}, mark.encode()
    found = []
    for name in os.listdir("/proc"):
        fields = _stat_fields(int(name)) if name.isdigit() else []
        if fields and fields[0] != "Z" and (fields[3] in session_ids or _has_mark(int(name), encoded_mark)):
            found.append(int(name))
    return found


def _has_mark(pid: int, mark: bytes) -> bool:
    if not mark:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def kill_sessions(sessions: Iterable[int], mark: str = "") -> None:
    """Kill all processes of some sessions, and those with a mark, also stopped ones."""
    session_ids = list(sessions)
    kill_process_groups(session_ids)  # this reaches most at once; the loop finds those that have left their group
    for _ in range(200):  # a process that is just being started is found in the next pass
        remaining = find_processes(session_ids, mark)
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


def reap_orphans() -> None:
    """Reap orphans that have ended, but not registered children, for whose exit other code waits."""
    for pid in _orphans():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


_registered_children: set[int] = set()


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


def oom_kill_count() -> int:
    """Return how many processes of this control group the kernel has killed because memory ran out."""
    for path in _oom_count_files():
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def _oom_count_files() -> Iterator[str]:
    """Yield the files in which the kernel counts them: of the control group itself, and of a container's root."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, group in groups:
            if "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory{group}/memory.oom_control"
            elif not controllers:
                yield f"/sys/fs/cgroup{group}/memory.events"
    yield "/sys/fs/cgroup/memory.events"
    yield "/sys/fs/cgroup/memory/memory.oom_control"
