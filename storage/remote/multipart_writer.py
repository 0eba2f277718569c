"""A writer that streams: appended pieces pass through a bounded queue into a thread that uploads them in parts.

obstore pulls the pieces from an iterator, cuts them into parts, and sends CONCURRENCY parts at a time. When the
iterator raises, it aborts the multipart upload; nothing of it is left in the bucket.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import ALIGNMENT, Writer

PART_BYTES = 8 * 1024 * 1024
CONCURRENCY = 8
"""Parts in flight in one upload. With the queue, a writer holds at most (CONCURRENCY + 3) parts in memory."""

_MAX_PARTS = 9_000  # S3 takes 10,000; the rest is for a size hint that was too small
_QUEUED_PARTS = 2


class MultipartWriter(Writer):
    """Calls `put(data, part_bytes)` once: with the bytes of a small object, or an iterator of pieces of a large one."""

    def __init__(self, url: str, put: Callable[[Any, int], None], size_hint: int) -> None:
        mebibyte = 1024 * 1024
        self._part_bytes = max(PART_BYTES, -(-size_hint // (_MAX_PARTS * mebibyte)) * mebibyte)
        self._url = url
        self._put = put
        self._append_lock = threading.Lock()  # held while one append queues all its pieces
        self._length = 0
        self._pieces = _PieceQueue(_QUEUED_PARTS * self._part_bytes)
        self._thread: threading.Thread | None = None
        self._is_ended = False

    def append(self, data: memoryview) -> int:
        with self._append_lock:
            self._require_open()
            position = -(-self._length // ALIGNMENT) * ALIGNMENT
            self._enqueue(bytes(position - self._length))
            for start in range(0, len(data), self._part_bytes):
                self._enqueue(bytes(data[start : start + self._part_bytes]))
            self._length = position + len(data)
            return position

    def commit(self) -> int:
        with self._append_lock:
            self._require_open()
            self._is_ended = True
            if self._thread is None:  # it all fits into one request
                self._put(b"".join(self._pieces.take_all()), self._part_bytes)
                return self._length
            self._pieces.finish()
            self._thread.join()
            self._raise_upload_error()
            return self._length

    def abort(self) -> None:
        self._pieces.cancel()  # first, for an append may hold the lock and wait for room
        with self._append_lock:
            self._is_ended = True
            if self._thread is not None:
                self._thread.join()

    def _enqueue(self, piece: bytes) -> None:
        if not piece:
            return
        if self._thread is None and self._pieces.queued_bytes + len(piece) > self._part_bytes:
            # The thread knows the queue, not this writer, so that a writer that is dropped can end it.
            self._thread = threading.Thread(
                target=_run_upload, args=(self._put, self._pieces, self._part_bytes), name="ckpt-upload", daemon=True
            )
            self._thread.start()
        if not self._pieces.put(piece):
            self._raise_upload_error()
            raise StoreError(f"uploading {self._url}: the writer was aborted; create a new one")

    def _require_open(self) -> None:
        self._raise_upload_error()
        if self._is_ended:
            raise StoreError(f"uploading {self._url}: the writer was committed or aborted; create a new one")

    def _raise_upload_error(self) -> None:
        error = self._pieces.error
        if isinstance(error, StoreError):
            raise StoreError(str(error)) from error
        if error is not None:
            raise StoreError(f"uploading {self._url} failed: {error!r}; see the cause") from error

    def __del__(self) -> None:
        self._pieces.cancel()


def _run_upload(put: Callable[[Any, int], None], pieces: _PieceQueue, part_bytes: int) -> None:
    try:
        put(pieces.drain(), part_bytes)
    except _Cancelled:
        pass
    except BaseException as error:
        pieces.error = error
    finally:
        pieces.cancel()  # a caller that waits for room must not wait for ever


class _Cancelled(Exception):
    """Raised inside the upload to make obstore abort it."""


class _PieceQueue:
    """A queue of byte strings, bounded by their length, that can be finished or cancelled from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.queued_bytes = 0
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_finished = False
        self._is_cancelled = False
        self.error: BaseException | None = None
        """Why the upload failed, where it did."""

    def put(self, piece: bytes) -> bool:
        """Queue a piece as soon as there is room; False where the queue was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self.queued_bytes < self._limit_bytes)
            if self._is_cancelled:
                return False
            self._queue.append(piece)
            self.queued_bytes += len(piece)
            self._changed.notify_all()
            return True

    def drain(self) -> Iterator[bytes]:
        """Yield the pieces until the queue is finished; raise _Cancelled where it is cancelled."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_cancelled or self._is_finished or self._queue)
                if self._is_cancelled:
                    raise _Cancelled
                if not self._queue:
                    return
                piece = self._queue.popleft()
                self.queued_bytes -= len(piece)
                self._changed.notify_all()
            yield piece

    def take_all(self) -> list[bytes]:
        """All pieces at once, where no one drains the queue."""
        with self._changed:
            pieces = list(self._queue)
            self._queue.clear()
            self.queued_bytes = 0
            return pieces

    def finish(self) -> None:
        """No piece follows."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Give up: pieces not yet drained are lost."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
