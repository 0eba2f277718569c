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


class Loan:
    """A buffer that one sender fills. It keeps it while another `_UNIT` of bytes comes in time, and once it is full."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self._memory: mmap.mmap | None = memory
        self._nbytes = nbytes
        self._heard_at = 0
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self.filled = 0

    def add(self, data: memoryview) -> None:
        """Append to what came. Raises Unavailable where the buffer was taken back meanwhile."""
        with self._lock:
            if self._memory is None:
                raise Unavailable("the bytes came so slowly that the buffer was given to another writer; send the append again")
            self._memory[self.filled : self.filled + len(data)] = data
            self.filled += len(data)
            if self.filled - self._heard_at >= _UNIT:
                self._heard_at, self._heard = self.filled, time.monotonic()

    def whole(self) -> memoryview:
        """All bytes, which came: the buffer can't be taken back any more. To be released before the loan ends."""
        with self._lock:
            if self._memory is None or self.filled < self._nbytes:
                raise Unavailable("the buffer was given to another writer; send the append again")
            return memoryview(self._memory)[: self._nbytes]

    def take_back(self, seconds: float) -> mmap.mmap | None:
        """The memory, where it waits for bytes and next to none came for so many seconds."""
        with self._lock:
            if self.filled == self._nbytes or time.monotonic() - self._heard < seconds:
                return None
            return self._given()

    def end(self) -> mmap.mmap | None:
        """The memory, unless it was taken back."""
        with self._lock:
            return self._given()

    def _given(self) -> mmap.mmap | None:
        memory, self._memory = self._memory, None
        return memory


class Buffers:
    """Up to `capacity` bytes of buffers. Whoever wants more waits, and that slows the senders down."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._idle: list[mmap.mmap] = []
        self._lent: set[Loan] = set()
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, nbytes: int, seconds: float) -> Iterator[Loan]:
        """Memory of `nbytes`, for as long as the context lasts; Unavailable where none comes free in time.

        Who waits takes it from a sender of whom next to nothing comes for half of that time.
        """
        loan = Loan(self._take(max(_UNIT, -(-nbytes // _UNIT) * _UNIT), seconds), nbytes)
        with self._changed:
            self._lent.add(loan)
        try:
            yield loan
        finally:
            with self._changed:
                self._lent.discard(loan)
                if (memory := loan.end()) is not None:
                    self._idle.append(memory)
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
                if taken := next(filter(None, (loan.take_back(seconds / 2) for loan in self._lent)), None):
                    self._idle.append(taken)
                else:
                    self._changed.wait(min(left, seconds / 10))
