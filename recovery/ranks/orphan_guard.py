"""The orphan guard: a process that ends the ranks of an agent that was killed or has stopped.

It reads the sessions of the ranks from a pipe ("+123", "-123"). When the agent ends, the pipe closes. Then the guard ends the
remaining ranks, removes their heartbeat pages from memory, and ends itself. So no rank outlives `ckpt-run`, even if that is
killed. With several hosts, the guard also ends the ranks if their agent was stopped for so long that the other hosts continue
without it.
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

from ckpt.recovery.ranks import process_kill

_POLL_SECONDS = 0.5


class OrphanGuard:
    """The agent's side of an orphan guard.

    mark: the environment variable (NAME=value) of the ranks and of all processes that they start.
    pages: the folder of the heartbeat pages, which is removed with the ranks.
    lost_seconds: the ranks are also ended after this time without `send_heartbeat`; 0 never.
    """

    def __init__(self, mark: str, pages: Path, lost_seconds: float = 0.0) -> None:
        self._command = [sys.executable, "-m", "ckpt.recovery.ranks.orphan_guard", mark, str(pages), str(lost_seconds)]
        self._sessions: set[int] = set()
        self._ended_processes: list[subprocess.Popen[bytes]] = []
        self._process = self._start_process()

    def _start_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        process_kill.register_child(process.pid)
        return process

    def ensure_running(self) -> None:
        """Start another guard process if the current one was killed. The agent calls this several times a second."""
        if self._process.poll() is None:
            return
        with contextlib.suppress(OSError):  # there may be no memory for it now; the next call tries again
            process = self._start_process()
            self._ended_processes.append(self._process)  # keep its pipe open, as another thread may write to it
            self._process = process
        for session in self._sessions:
            self._send_line(f"+{session}")

    def add(self, session: int) -> None:
        """Guard the session of a rank."""
        self._sessions.add(session)
        self._send_line(f"+{session}")

    def remove(self, session: int) -> None:
        """Guard the session of a rank no longer, because it has ended."""
        self._sessions.discard(session)
        self._send_line(f"-{session}")

    def send_heartbeat(self) -> None:
        """Report to the guard that the agent is alive."""
        self._send_line(".")

    def _send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed; until `ensure_running`, only the agent ends the ranks
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def guard_sessions(mark: str, pages: str, lost_seconds: float) -> None:
    """Run the guard process until its input closes."""
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
            last_input_at = now  # the whole host was suspended, not only the agent
        elif lost_seconds and now - last_input_at > lost_seconds:
            process_kill.kill_sessions(sessions, mark)  # the other hosts take this one for lost and continue without it
    process_kill.kill_sessions(sessions, mark)
    shutil.rmtree(pages, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    guard_sessions(sys.argv[1], sys.argv[2], float(sys.argv[3]))
