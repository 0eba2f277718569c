"""Shows what ranks write, from a thread of its own: a terminal that was stopped, or a disk that is full, holds up nothing."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ckpt.recovery.ranks.launch import RankProcess

_COPY_SECONDS = 0.1
_FLUSH_SECONDS = 1.0
"""For what was written last. Who does not read it by then does not get it."""


class LogConsole:
    """Copies logs to the standard output: of "all" ranks, of rank "0", or of "none"."""

    def __init__(self, which: str) -> None:
        self._shown = which
        self._files: deque[list[Path]] = deque(maxlen=2)  # of this attempt, and what is left of the one before
        self._copied_bytes: dict[Path, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-console", daemon=True)
        if which != "none":
            self._thread.start()

    def follow(self, ranks: Sequence[RankProcess]) -> None:
        """From now on these, too."""
        self._files.append([rank.log for rank in ranks if self._shown == "all" or rank.number == 0])

    def _run(self) -> None:
        try:
            while not self._closed.wait(_COPY_SECONDS):
                self._copy()
            self._copy()
        except OSError:
            pass  # nobody is there any more

    def _copy(self) -> None:
        for file in [file for files in list(self._files) for file in files]:
            done = self._copied_bytes.get(file, 0)
            if file.exists() and file.stat().st_size > done:
                with file.open("rb") as log:
                    log.seek(done)
                    data = log.read()
                self._copied_bytes[file] = done + len(data)
                while data:
                    data = data[os.write(1, data) :]

    def close(self) -> None:
        """With what was written last."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_FLUSH_SECONDS)
