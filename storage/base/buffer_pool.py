"""Reusable page-aligned buffers, in which a node keeps received bytes until they are written to the disk."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.huge_pages import map_huge_pages

_UNIT_BYTES = 1 << 20


class BorrowedBuffer:
    """A buffer that one sender fills.

    The pool may reclaim it while less than _UNIT_BYTES arrive in a given time; a full buffer is never reclaimed.
    """

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self._memory: mmap.mmap | None = memory
        self._nbytes = nbytes
        self._progress_bytes = 0
        self._progress_time = time.monotonic()
        self._lock = threading.Lock()
        """Guards `_memory`, `_progress_bytes` and `_progress_time`. Guards changes of `filled_bytes`."""
        self.filled_bytes = 0

    def append(self, data: memoryview) -> None:
        """Append received bytes; raise Unavailable if the pool has reclaimed the buffer."""
        with self._lock:
            if self._memory is None:
                raise Unavailable("data arrived too slowly, so the buffer was given to another writer; send the append again")
            self._memory[self.filled_bytes : self.filled_bytes + len(data)] = data
            self.filled_bytes += len(data)
            if self.filled_bytes - self._progress_bytes >= _UNIT_BYTES:
                self._progress_bytes, self._progress_time = self.filled_bytes, time.monotonic()

    def full_view(self) -> memoryview:
        """Return all bytes of a full buffer, which cannot be reclaimed any more. Release the view before the context ends.

        Raises Unavailable if the pool has reclaimed the buffer or it is not full.
        """
        with self._lock:
            if self._memory is None or self.filled_bytes < self._nbytes:
                raise Unavailable("the buffer was given to another writer; send the append again")
            return memoryview(self._memory)[: self._nbytes]

    def reclaim(self, seconds: float) -> mmap.mmap | None:
        """Return the memory if the buffer is not full and received less than _UNIT_BYTES for `seconds` seconds, else None."""
        with self._lock:
            if self.filled_bytes == self._nbytes or time.monotonic() - self._progress_time < seconds:
                return None
            return self._detach_memory()

    def release(self) -> mmap.mmap | None:
        """Return the memory, None if the pool has reclaimed it."""
        with self._lock:
            return self._detach_memory()

    def _detach_memory(self) -> mmap.mmap | None:
        """Return the memory, and refuse later appends. Needs `_lock`."""
        memory, self._memory = self._memory, None
        return memory


class BufferPool:
    """Buffers of up to `capacity` bytes in total, or a single longer one. Further borrowers wait: back-pressure on senders."""

    def __init__(self, capacity: int) -> None:
        self._capacity_bytes = capacity
        self._allocated_bytes = 0
        self._idle: list[mmap.mmap] = []
        self._lent: set[BorrowedBuffer] = set()
        self._changed = threading.Condition()
        """Guards `_lent`, `_idle` and `_allocated_bytes`. Notified when memory becomes free."""

    @contextmanager
    def borrow(self, nbytes: int, timeout_seconds: float) -> Iterator[BorrowedBuffer]:
        """Lend a buffer of `nbytes` bytes until the context ends; raise Unavailable if none becomes free in time.

        A waiting borrower reclaims the buffer of a sender that has sent almost nothing for half of `timeout_seconds`.
        """
        loan = BorrowedBuffer(
            self._allocate(max(_UNIT_BYTES, -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES), timeout_seconds), nbytes
        )
        with self._changed:
            self._lent.add(loan)
        try:
            yield loan
        finally:
            with self._changed:
                self._lent.discard(loan)
                if (memory := loan.release()) is not None:
                    self._idle.append(memory)
                    self._changed.notify()

    def _allocate(self, length: int, seconds: float) -> mmap.mmap:
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                for i, buffer in enumerate(self._idle):
                    if length <= len(buffer) <= 4 * length:
                        return self._idle.pop(i)
                while self._idle and self._allocated_bytes + length > self._capacity_bytes:
                    old = self._idle.pop()
                    self._allocated_bytes -= len(old)
                    old.close()
                if self._allocated_bytes + length <= self._capacity_bytes or not self._allocated_bytes:
                    memory = map_huge_pages(length)  # fails while the system has no memory
                    self._allocated_bytes += length
                    return memory
                remaining_seconds = until - time.monotonic()
                if remaining_seconds <= 0:
                    raise Unavailable(
                        f"no buffer of {length} bytes became free within {seconds:g} s; write with fewer clients at once"
                    )
                if reclaimed := next(filter(None, (loan.reclaim(seconds / 2) for loan in self._lent)), None):
                    self._idle.append(reclaimed)
                else:
                    self._changed.wait(min(remaining_seconds, seconds / 10))
