"""A process that outlives the one that looks after the ranks, just long enough to end what that has left running.

It reads the sessions of the ranks from a pipe ("+123", "-123"). When the other end closes, it ends those that are left, and
itself. So nothing goes on after `ckpt-run`, even where that is killed; and the pages of the ranks do not stay in memory. With
several hosts it ends the ranks also where their agent has stood still for so long that the others go on without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ckpt.recovery.ranks import processes

_POLL_SECONDS = 0.5


class OrphanGuard:
    """Its caller's side. mark: what the ranks, and all they start, have in their environment (NAME=value).
    pages: a folder that is of no use without them. lost_seconds: after so long without a `beat` the ranks are ended,
    too; 0 never."""

    def __init__(self, mark: str, pages: Path, lost_seconds: float = 0.0) -> None:
        self._command = [sys.executable, "-m", "ckpt.recovery.ranks.orphan_guard", mark, str(pages), str(lost_seconds)]
        self._sessions: set[int] = set()
        self._ended_processes: list[subprocess.Popen[bytes]] = []
        self._process = self._start_process()

    def _start_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        processes.register_child(process.pid)
        return process

    def ensure_running(self) -> None:
        """Start another where it was killed. To be called often."""
        if self._process.poll() is None:
            return
        with contextlib.suppress(OSError):  # no memory for one just now: the next look tries again
            process = self._start_process()
            self._ended_processes.append(self._process)  # kept, as another thread may be writing to its pipe
            self._process = process
        for session in self._sessions:
            self._send_line(f"+{session}")

    def add(self, session: int) -> None:
        self._sessions.add(session)
        self._send_line(f"+{session}")

    def remove(self, session: int) -> None:
        self._sessions.discard(session)
        self._send_line(f"-{session}")

    def send_heartbeat(self) -> None:
        """The caller is alive."""
        self._send_line(".")

    def _send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: until `look`, only the caller ends the ranks
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def guard_sessions(mark: str, pages: str, lost_seconds: float) -> None:
    """The other side."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    last_input_at = polled_at = time.monotonic()
    data = b""
    while True:
        ready = select.select([0], [], [], _POLL_SECONDS)[0]
        now = time.monotonic()
        gap, polled_at = now - polled_at, now
        if ready:
            more = os.read(0, 65536)
            if not more:
                break
            last_input_at = now
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                if line[:1] == b"+":
                    sessions.add(int(line[1:]))
                elif line[:1] == b"-":
                    sessions.discard(int(line[1:]))
        elif gap > 2 * _POLL_SECONDS:
            last_input_at = now  # the whole host stood still
        elif lost_seconds and now - last_input_at > lost_seconds:
            processes.kill_sessions(sessions, mark)  # the others take this host for lost, and go on without it
    processes.kill_sessions(sessions, mark)
    shutil.rmtree(pages, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    guard_sessions(sys.argv[1], sys.argv[2], float(sys.argv[3]))
