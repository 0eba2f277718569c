"""A process that outlives the one that looks after the ranks, just long enough to end what that has left running.

It reads the sessions of the ranks from a pipe ("+123", "-123"). When the other end closes, it ends those that are left, and
itself. So nothing goes on after `ckpt-run`, even where that is killed; and the pages of the ranks do not stay in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from ckpt.recovery import host


class Guardian:
    """Its caller's side. mark: what the ranks, and all they start, have in their environment (NAME=value).
    pages: a folder that is of no use without them."""

    def __init__(self, mark: str, pages: Path) -> None:
        command = [sys.executable, "-m", "ckpt.recovery.guardian", mark, str(pages)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        host.own(self._process.pid)

    def add(self, session: int) -> None:
        self._tell(f"+{session}")

    def remove(self, session: int) -> None:
        self._tell(f"-{session}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: then only the caller ends the ranks
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def watch(lines: TextIO, mark: str, pages: str) -> None:
    """The other side."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in lines:
        if line[0] == "+":
            sessions.add(int(line[1:]))
        else:
            sessions.discard(int(line[1:]))
    host.end(sessions, mark)
    shutil.rmtree(pages, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    watch(sys.stdin, *sys.argv[1:])
