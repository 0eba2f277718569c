"""`LogConsole`, a thread that copies the logs of ranks to the console.

A stopped terminal or a full disk blocks only this thread, not the agent and not the ranks.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ckpt.recovery.ranks.rank_process import RankProcess
from ckpt.storage.base.background_stderr import write_when_ready

log = logging.getLogger("ckpt.run")

_COPY_SECONDS = 0.1
_PART_BYTES = 1 << 16
"""How much of a log is kept in memory. The ranks may write many GB while nobody reads the console."""
_FLUSH_SECONDS = 1.0
"""How long `close` waits for the last output to be written. After that it is lost to a reader that is too slow."""


class LogConsole:
    """Copies the logs of "all" ranks, of rank "0", or of "none" to the standard output.

    The main thread calls the methods. It only appends to `_files`, of which the thread of this object reads a copy, and sets
    the begins of logs that this thread does not copy yet.
    """

    def __init__(self, which: str) -> None:
        self._shown = which
        self._files: deque[list[Path]] = deque(maxlen=2)  # those of this attempt, and those of the attempt before
        self._copied_bytes: dict[Path, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-console", daemon=True)
        if which != "none":
            self._thread.start()

    def follow(self, ranks: Sequence[RankProcess]) -> None:
        """Copy what these ranks write to their logs, too."""
        self._copied_bytes |= {rank.log: rank.log_begin for rank in ranks}
        self._files.append([rank.log for rank in ranks if self._shown == "all" or rank.number == 0])

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(_COPY_SECONDS)
            try:
                self._copy()
            except _ReaderGone:
                return
            except Exception as error:  # a full disk or a lack of memory may be temporary: the rest is copied next time
                log.debug("the output of the ranks can't be copied, and is copied later: %s", error)

    def _copy(self) -> None:
        for file in [file for files in list(self._files) for file in files]:
            done = self._copied_bytes.get(file, 0)
            if file.exists() and (size := file.stat().st_size) > done:
                with file.open("rb") as written:
                    while data := os.pread(written.fileno(), min(_PART_BYTES, size - done), done):
                        self._copied_bytes[file] = done = done + _write(data)

    def close(self) -> None:
        """Copy what the ranks have written last, and end the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_FLUSH_SECONDS)


class _ReaderGone(Exception):
    """Raised if nothing more can be written to the standard output."""


_GONE_ERRORS = {errno.EPIPE, errno.EBADF, errno.EIO}
"""The reader of a pipe has ended, the output is closed, or the terminal is gone."""


def _write(data: bytes) -> int:
    """Write a part of some bytes to the standard output, and return its length. Raises OSError if that may work later."""
    try:
        return write_when_ready(1, data)
    except OSError as error:
        if error.errno in _GONE_ERRORS:
            raise _ReaderGone from error
        raise
