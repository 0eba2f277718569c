"""The first error of a save attempt, which ends all of its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt.block_io.staging_arena import ArenaAbandoned


class AttemptFailure:
    """Shared by the threads of one attempt: each reports what goes wrong, and looks here whether to go on."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """Written once, under the lock; read by any thread at any time."""
        self._lock = threading.Lock()
        self._wake: list[Callable[[], None]] = []

    def on_error(self, wake: Callable[[], None]) -> None:
        """Call `wake` at each error from now on: it lets threads go on that wait for each other."""
        with self._lock:
            self._wake.append(wake)

    def report(self, error: BaseException) -> None:
        """Remember the first error and wake everyone."""
        with self._lock:
            if self.error is None and not isinstance(error, ArenaAbandoned):
                self.error = error
            wake = list(self._wake)
        for call in wake:
            call()

    def raise_error(self) -> None:
        """Raise the first error, if there is one."""
        if self.error is not None:
            raise self.error
