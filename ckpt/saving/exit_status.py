"""Gives a program exit status 120 if its last save failed in the background, and runs functions at its end.

Python ignores exceptions of functions that `atexit` runs. It ends with status 120 if its clean-up fails, which includes
flushing sys.stdout and sys.stderr (`sys.exit`, Python's library reference). Therefore a failing flush is used here. Unlike
os._exit, it lets all other exit functions run.
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
    """A text stream that writes to another one, and whose flush fails."""

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
    """Make this program end with FAILED_CLEANUP_STATUS. Call it from a function that `atexit` runs.

    After an uncaught exception the status stays as it is. A status that was given to sys.exit is replaced, because it is not
    visible here.
    """
    if getattr(sys, "last_value", None) is None:  # Python sets it if an uncaught exception ends the program
        sys.stderr = _FailingFlushStream(sys.stderr)


def register_before_thread_shutdown(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function that runs at the end of the program, before the executors of concurrent.futures end and before
    `atexit`.

    Saves need these executors, and resources that other packages release in `atexit`.
    """
    register = getattr(threading, "_register_atexit", None) or atexit.register
    register(function)
    return function
