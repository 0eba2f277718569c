"""The class AttemptFailure, which records the first error of a save attempt and wakes its waiting threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt.block_io.staging_arena import ArenaAbandoned


class AttemptFailure:
    """Shared by the threads of one attempt. Each reports its errors, and stops if there is one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """Set once. Any thread may read it at any time."""
        self._lock = threading.Lock()
        """Guards `_wake`. Guards changes of `error`."""
        self._wake: list[Callable[[], None]] = []

    def on_error(self, wake: Callable[[], None]) -> None:
        """Register a function that each later error calls. It must wake threads that wait for other threads."""
        with self._lock:
            self._wake.append(wake)

    def report(self, error: BaseException) -> None:
        """Record an error if it is the first, and wake all threads. ArenaAbandoned, a consequence of an error, only wakes."""
        with self._lock:
            if self.error is None and not isinstance(error, ArenaAbandoned):
                self.error = error
            wake = list(self._wake)
        for call in wake:
            call()

    def raise_error(self) -> None:
        """Raise the recorded error, if there is one."""
        if self.error is not None:
            raise self.error
