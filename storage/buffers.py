"""Page-aligned memory that is used again and again: what a node receives waits in it for the disk."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.storage.errors import Unavailable
from ckpt.storage.pages import pages

_UNIT = 1 << 20


class Buffers:
    """Up to `capacity` bytes of buffers. Whoever wants more waits, and that slows the senders down."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._idle: list[mmap.mmap] = []
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, nbytes: int, seconds: float) -> Iterator[memoryview]:
        """Memory of at least `nbytes`, for as long as the context lasts; Unavailable where none comes free in time."""
        found = self._take(max(_UNIT, -(-nbytes // _UNIT) * _UNIT), seconds)
        view = memoryview(found)
        try:
            yield view
        finally:
            view.release()
            with self._changed:
                self._idle.append(found)
                self._changed.notify()

    def _take(self, length: int, seconds: float) -> mmap.mmap:
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                for i, buffer in enumerate(self._idle):
                    if length <= len(buffer) <= 4 * length:
                        return self._idle.pop(i)
                while self._idle and self._held + length > self._capacity:
                    old = self._idle.pop()
                    self._held -= len(old)
                    old.close()
                if self._held + length <= self._capacity or not self._held:
                    self._held += length
                    return pages(length)
                left = until - time.monotonic()
                if left <= 0:
                    raise Unavailable(f"no buffer of {length} bytes came free within {seconds:g} s: too many writers at once")
                self._changed.wait(left)
