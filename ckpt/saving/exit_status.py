"""The end of a program with saves under way, and its exit status where the last one failed in the background.

Python ignores exceptions of functions that `atexit` runs. It ends with status 120 where the clean-up fails, which it finds out
by flushing sys.stdout and sys.stderr (`sys.exit`, Python's library reference). A flush that fails is used for that reason:
unlike os._exit it lets everything else that runs at exit run.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

FAILED_CLEANUP_STATUS = 120
"""Python's status of a program whose clean-up failed."""


class _FailingFlushStream:
    """A text stream that writes as the one below, and whose flush fails."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def closed(self) -> bool:
        return False

    def write(self, text: str) -> int:
        return 0 if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()
        raise OSError("a save failed; see the error above")


def fail_cleanup() -> None:
    """Let this program end with STATUS, from a function that `atexit` runs. An uncaught exception keeps its own status.

    A status that was given to sys.exit can't be seen from here, and becomes STATUS.
    """
    if getattr(sys, "last_value", None) is None:  # set by Python where an uncaught exception ends the program
        sys.stderr = _FailingFlushStream(sys.stderr)


def register_before_thread_shutdown(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function that the end of the program calls before the executors of concurrent.futures end, and before any
    function of `atexit`: saves need the executors, and what other packages release there."""
    register = getattr(threading, "_register_atexit", None) or atexit.register
    register(function)
    return function
