"""The orphan guard: a process that ends the ranks of an agent that was killed or has stopped.

It reads the sessions of the ranks ("+123", "-123") and heartbeats of the agent (".") from a pipe. When the agent ends, the
pipe closes. Then the guard ends the remaining ranks, removes their heartbeat pages from memory, and ends itself. So no rank
outlives `ckpt-run`, even if that is killed. With several hosts, the guard also ends the ranks if their agent was stopped for
so long that the other hosts continue without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ckpt.recovery.ranks import process_kill
from ckpt.storage.base.background_stderr import write_stderr_in_background

log = logging.getLogger("ckpt")

_POLL_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 60.0
_END_SECONDS = 30.0
"""How long `OrphanGuard.close` waits for the end of the process, which first ends all ranks."""
_LOST_TEXT = (
    "ckpt-run: this agent was stopped or hung for {seconds:.0f} s, so its ranks are ended: the other hosts continue without "
    "this host"
)


class OrphanGuard:
    """The agent's side of an orphan guard. Several threads may use it.

    mark: the environment variable (NAME=value) of the ranks and of all processes that they start.
    pages: the folder of the heartbeat pages, which is removed with the ranks.
    lost_seconds: the ranks are also ended after this time without a line from the agent; 0 means never. The time begins with
        the first line: an agent that joins a run has no ranks yet, and may take longer.
    """

    def __init__(self, mark: str, pages: Path, lost_seconds: float = 0.0) -> None:
        # -P: a file of the working directory that has the name of a module would otherwise be imported in its place.
        self._command = [sys.executable, "-P", "-m", "ckpt.recovery.ranks.orphan_guard", mark, str(pages), str(lost_seconds)]
        self._lock = threading.Lock()
        """Guards the process with its pipe, and the sessions."""
        self._sessions: set[int] = set()
        self._pause_seconds, self._next_start_at = _FIRST_PAUSE_SECONDS, 0.0
        self._process = self._start_process()

    def _start_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        process_kill.register_child(process.pid)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def ensure_running(self) -> None:
        """Start another guard process if the current one has ended. The agent calls this twice a second while ranks run.

        After each start, the next one waits twice as long, up to a minute, because the guard may be unable to run here.
        """
        with self._lock:
            status, now = self._process.poll(), time.monotonic()
            if status is None or now < self._next_start_at:
                return
            log.warning("the guard that ends the ranks of a killed ckpt-run has ended (status %d); it is started again", status)
            self._next_start_at = now + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            with contextlib.suppress(OSError):  # there may be no memory for it now; a later call tries again
                process = self._start_process()
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process = process
                for session in self._sessions:
                    self._send_line(f"+{session}")

    def add(self, session: int) -> None:
        """Guard the session of a rank."""
        with self._lock:
            self._sessions.add(session)
            self._send_line(f"+{session}")

    def remove(self, session: int) -> None:
        """Guard the session of a rank no longer, because it has ended."""
        with self._lock:
            self._sessions.discard(session)
            self._send_line(f"-{session}")

    def send_heartbeat(self) -> None:
        """Report to the guard that the agent is alive."""
        with self._lock:
            self._send_line(".")

    def _send_line(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())
        except BlockingIOError:  # it was stopped for hours, so that its pipe is full: `ensure_running` starts another one
            self._process.kill()
        except OSError:
            pass  # it has ended; until `ensure_running`, only the agent ends the ranks

    def close(self) -> None:
        """End the guard process, which first ends the ranks that are left and removes their pages."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # it is stopped
                self._process.kill()
                process_kill.wait_for_killed(self._process)


def guard_sessions(mark: str, pages: str, lost_seconds: float) -> None:
    """Run the guard process. When its input closes, end the ranks that are left, remove their pages, and exit.

    If no input comes for `lost_seconds`, it ends the ranks, and continues: the agent may run again and start others.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    write_stderr_in_background()
    sessions: set[int] = set()
    has_begun = is_reported = False
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
            last_input_at, has_begun, is_reported = now, True, False
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                if line[:1] == b"+":
                    sessions.add(int(line[1:]))
                elif line[:1] == b"-":
                    sessions.discard(int(line[1:]))
        elif gap > 2 * _POLL_SECONDS:
            last_input_at = now  # the whole host was suspended, not only the agent
        elif lost_seconds and has_begun and now - last_input_at > lost_seconds:
            process_kill.kill_sessions(sessions, mark)  # the other hosts take this one for lost and continue without it
            if sessions and not is_reported:
                is_reported = True
                with contextlib.suppress(OSError):
                    print(_LOST_TEXT.format(seconds=now - last_input_at), file=sys.stderr, flush=True)
    process_kill.kill_sessions(sessions, mark)
    shutil.rmtree(pages, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    guard_sessions(sys.argv[1], sys.argv[2], float(sys.argv[3]))
