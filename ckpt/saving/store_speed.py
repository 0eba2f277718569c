"""The class StoreSpeed, which measures how fast a store takes bytes, from the appends of all writer threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckpt.saving.busy_time import BusyTime

_WINDOW_SECONDS = 0.3
"""Seconds of writing that make one measurement. A save to a fast store ends before that and never imports numcodecs."""

_WINDOW_APPENDS = 4
"""Appends of each thread in a window: those that are still running at its end are not counted."""

_WINDOW_BYTES = 4 << 20
"""The least bytes of a window."""

_NEW_WEIGHT = 0.5
"""The weight of one window in the average: the speed of a store changes over minutes."""

_SATURATED_SHARE = 0.6
"""If fewer of the writer threads than this share wait for the store, the store could have taken more bytes."""


class StoreSpeed:
    """The speed of one store. Safe to use from many threads.

    While encoding is slower than the store, few threads write at once, and the store seems slower than it is. So the speed in
    such a window is only a lower limit.

    clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        """Guards `_writing`, `_bytes`, `_appends` and `_is_first_window`. Guards changes of `_speed`."""
        self._speed: float | None = None
        self._is_first_window = True
        """Whether the window is the first, which counts only if a save ends with it: files are created and memory is mapped in
        it."""
        self._writing = BusyTime(clock)
        """The threads that write, in the time of the window."""
        self._bytes = 0
        self._appends = 0

    def bytes_per_second(self) -> float | None:
        """Return the speed of the store, None until enough was written to measure it."""
        return self._speed

    def write_began(self, threads: int = 1) -> None:
        """Record that threads started to write to the store, or wait until what they wrote is durable."""
        with self._lock:
            self._writing.add_threads(threads)

    def write_ended(self, nbytes: int, writers: int, threads: int = 1) -> None:
        """Record that these threads have written `nbytes` bytes.

        writers: the number of threads that encode and write in this save.
        """
        with self._lock:
            self._writing.add_threads(-threads)
            self._bytes += nbytes
            self._appends += 1
            is_end = threads == writers
            if self._bytes < _WINDOW_BYTES:
                if is_end:  # in a small save, the time depends on the latency of calls rather than on the bytes
                    self._reset_window()
            elif (is_end or self._appends >= _WINDOW_APPENDS * writers) and self._writing.seconds >= _WINDOW_SECONDS:
                self._end_window(writers, is_end)

    def _end_window(self, writers: int, is_end: bool) -> None:
        """Count the speed of a window, and begin the next. Needs `_lock`."""
        is_first, self._is_first_window = self._is_first_window, False
        if is_first and not is_end:
            self._reset_window()
            return
        measured = self._bytes / self._writing.seconds
        is_saturated = self._writing.thread_seconds >= _SATURATED_SHARE * writers * self._writing.seconds
        if self._speed is None:
            self._speed = measured
        elif is_saturated:
            self._speed += _NEW_WEIGHT * (measured - self._speed)
        else:
            self._speed = max(self._speed, measured)
        self._reset_window()

    def _reset_window(self) -> None:
        """Begin a window. Needs `_lock`."""
        self._writing.reset()
        self._bytes = self._appends = 0
