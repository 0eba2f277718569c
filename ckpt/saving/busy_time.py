"""The class BusyTime, which counts the seconds in which at least one thread does something."""

from __future__ import annotations

from collections.abc import Callable


class BusyTime:
    """Counts seconds for an owner, whose lock guards it.

    clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._threads = 0
        self._changed_at = 0.0
        self.seconds = 0.0
        """Seconds in which at least one thread was busy."""
        self.thread_seconds = 0.0
        """The same, multiplied by the number of threads that were busy."""

    def add_threads(self, threads: int) -> None:
        """Record that threads begin; with a negative number, that they have ended."""
        now = self._clock()
        if self._threads:
            self.seconds += now - self._changed_at
            self.thread_seconds += self._threads * (now - self._changed_at)
        self._changed_at = now
        self._threads += threads

    def reset(self) -> None:
        """Count from zero. Threads that are busy stay so."""
        self.seconds = self.thread_seconds = 0.0
