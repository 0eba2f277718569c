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


def state(pid: int) -> str:
    """The state of a process as /proc has it: R, S, D, T (stopped), Z …; "" where there is none."""
    return (_fields(pid) or [""])[0]


def _fields(pid: int) -> list[str]:
    """What /proc says of a process behind its name: state, parent, group, session …; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def members(sessions: Iterable[int], mark: str = "") -> list[int]:
    """All living processes of some sessions, and those that were started with `mark` (NAME=value) in their environment: a child
    that has left its session has kept that."""
    wanted, sought = {str(session) for session in sessions}, mark.encode()
    found = []
    for name in os.listdir("/proc"):
        fields = _fields(int(name)) if name.isdigit() else []
        if fields and fields[0] != "Z" and (fields[3] in wanted or _has(int(name), sought)):
            found.append(int(name))
    return found


def _has(pid: int, mark: bytes) -> bool:
    if not mark:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def end(sessions: Iterable[int], mark: str = "") -> None:
    """Kill all processes of some sessions, and those that bear a mark, stopped ones too."""
    wanted = list(sessions)
    kill(wanted)  # at once; then those that have left its group
    for _ in range(200):  # a process that is just being started is found in the next round
        left = members(wanted, mark)
        if not left:
            return
        for pid in left:
            _signal(pid, signal.SIGKILL)
        reap()
        time.sleep(0.005)


def kill(sessions: Iterable[int]) -> None:
    """Kill the leaders of some sessions and their process groups, without waiting for anything."""
    for leader in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def reap() -> None:
    """Take leave of orphans that have ended. Not of our own children, whose exit somebody waits for."""
    for pid in _orphans():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


_own: set[int] = set()


def own(pid: int) -> None:
    """A child that is waited for elsewhere."""
    _own.add(pid)


def _orphans() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split() if int(pid) not in _own]
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def memory_kills() -> int:
    """How many processes of this control group the kernel has killed for memory."""
    for path in _memory_counts():
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def _memory_counts() -> Iterator[str]:
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
