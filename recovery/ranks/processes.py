"""Processes of this host: started so that they can be found again, watched without polling, and ended with all they started."""

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
    """End this process when the thread that started it ends, however that ends."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of what children leave behind."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def process_state(pid: int) -> str:
    """The state of a process as /proc has it: R, S, D, T (stopped), Z …; "" where there is none."""
    return (_stat_fields(pid) or [""])[0]


def _stat_fields(pid: int) -> list[str]:
    """What /proc says of a process behind its name: state, parent, group, session …; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def find_processes(sessions: Iterable[int], mark: str = "") -> list[int]:
    """All living processes of some sessions, and those that were started with `mark` (NAME=value) in their environment: a child
    that has left its session has kept that."""
    session_ids, sought = {str(session) for session in sessions}, mark.encode()
    found = []
    for name in os.listdir("/proc"):
        fields = _stat_fields(int(name)) if name.isdigit() else []
        if fields and fields[0] != "Z" and (fields[3] in session_ids or _has_mark(int(name), sought)):
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
    """Kill all processes of some sessions, and those that bear a mark, stopped ones too."""
    session_ids = list(sessions)
    kill_process_groups(session_ids)  # at once; then those that have left its group
    for _ in range(200):  # a process that is just being started is found in the next round
        remaining = find_processes(session_ids, mark)
        if not remaining:
            return
        for pid in remaining:
            _send_signal(pid, signal.SIGKILL)
        reap_orphans()
        time.sleep(0.005)


def kill_process_groups(sessions: Iterable[int]) -> None:
    """Kill the leaders of some sessions and their process groups, without waiting for anything."""
    for leader in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def reap_orphans() -> None:
    """Take leave of orphans that have ended. Not of our own children, whose exit somebody waits for."""
    for pid in _orphans():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


_registered_children: set[int] = set()


def register_child(pid: int) -> None:
    """A child that is waited for elsewhere."""
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
    """How many processes of this control group the kernel has killed for memory."""
    for path in _oom_count_files():
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def _oom_count_files() -> Iterator[str]:
    """Where the kernel counts them: for the group itself, or what a container sees as the root."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, group in groups:
            if "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory{group}/memory.oom_control"
            elif not controllers:
                yield f"/sys/fs/cgroup{group}/memory.events"
    yield "/sys/fs/cgroup/memory.events"
    yield "/sys/fs/cgroup/memory/memory.oom_control"
