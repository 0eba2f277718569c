"""Reads what /proc has about processes of this host: their state, those of a session or with a mark, out-of-memory kills."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

_EXEC_SECONDS = 1.0
"""How long a search waits for the environment of a process that begins another program."""
_KTHREADD = "2"
"""The id of the parent of all threads of the kernel, which have no environment."""


def process_state(pid: int) -> str:
    """Return the state of a process from /proc: R, S, D, T (stopped), Z …; "" if it does not exist, "?" if it can't be read."""
    try:
        return (_stat_fields(pid) or [""])[0]
    except OSError:  # e.g. this process has too many open files
        return "?"


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, group, session …; empty if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # the kernel cuts the name at any byte
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def find_processes(sessions: Iterable[int], mark: str = "", spared_sessions: Iterable[int] = ()) -> list[int]:
    """Return the ids of all living processes of some sessions, and of those with `mark` (NAME=value) in their environment.

    A descendant that has left its session still has the mark. Raises OSError if /proc can't be read now.

    spared_sessions: their processes are left out although they have the mark.
    """
    session_ids, encoded_mark = {str(session) for session in sessions}, mark.encode()
    spared = {str(session) for session in spared_sessions}
    found = []
    for name in os.listdir("/proc"):
        fields = _stat_fields(int(name)) if name.isdigit() else []
        if not fields or fields[0] == "Z":
            continue
        if fields[3] in session_ids or (
            encoded_mark and fields[3] not in spared and fields[1] != _KTHREADD and encoded_mark in _environment(int(name))
        ):
            found.append(int(name))
    return found


def _environment(pid: int) -> list[bytes]:
    """Return the environment of a process; empty if it has ended, or is that of another user."""
    until, has_begun = time.monotonic() + _EXEC_SECONDS, False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        while True:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if environment := file.read():
                    return environment.split(b"\0")
            if has_begun or process_state(pid) in ("", "Z") or time.monotonic() > until:
                break
            # Until an exec has ended, /proc shows neither the environment nor the arguments of the new program.
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                has_begun = bool(file.read())
            if not has_begun:
                time.sleep(0.001)
    return []


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
    """Yield the files in which the kernel counts out-of-memory kills: of the control group, and of a container's root."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        groups = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, group in groups:
            if "memory" in controllers.split(","):
                yield f"/sys/fs/cgroup/memory{group}/memory.oom_control"
            elif not controllers:
                yield f"/sys/fs/cgroup{group}/memory.events"
    yield "/sys/fs/cgroup/memory.events"
    yield "/sys/fs/cgroup/memory/memory.oom_control"
