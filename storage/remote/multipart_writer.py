"""A writer that streams to a bucket: appended bytes pass through a bounded queue to a thread that uploads parts.

obstore takes the bytes from an iterator, splits them into parts, and sends CONCURRENCY parts at a time. If the iterator raises,
obstore aborts the multipart upload, and nothing of it stays in the bucket.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.store import ALIGNMENT, Writer
from ckpt.storage.base.threads import WorkerThread, start_or_raise

PART_BYTES = 8 * 1024 * 1024
CONCURRENCY = 8
"""Parts that one upload sends at the same time. With the queue, a writer has at most (CONCURRENCY + 3) parts in memory."""

_MAX_PARTS = 9_000  # S3 accepts 10,000; the rest is a reserve for a size hint that was too small
_QUEUED_PARTS = 2


class MultipartWriter(Writer):
    """Calls `put(data, part_bytes)` once: with the bytes of a small object, or with an iterator over those of a large one."""

    def __init__(self, url: str, put: Callable[[bytes | Iterator[bytes], int], None], size_hint: int) -> None:
        mebibyte = 1024 * 1024
        self._part_bytes = max(PART_BYTES, -(-size_hint // (_MAX_PARTS * mebibyte)) * mebibyte)
        self._url = url
        self._put = put
        self._append_lock = threading.Lock()
        """Guards `_length`. Guards changes of `_thread` and `_is_ended`. It keeps the pieces of one append together in the
        queue."""
        self._length = 0
        self._pieces = _PieceQueue(_QUEUED_PARTS * self._part_bytes)
        self._thread: threading.Thread | None = None
        self._is_ended = False

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
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
            if self._thread is None:  # the whole object fits into one request
                self._put(b"".join(self._pieces.take_all()), self._part_bytes)
                return self._length
            self._pieces.finish()
            self._thread.join()
            self._raise_upload_error()
            if not self._pieces.is_uploaded:
                raise self._aborted_error()
            return self._length

    def abort(self) -> None:
        self._pieces.cancel()  # before taking the lock, which an append may have while it waits for room
        with self._append_lock:
            self._is_ended = True
            if self._thread is not None:
                self._thread.join()

    def _enqueue(self, piece: bytes) -> None:
        """Queue a piece, and start the upload when there is more than one part. Needs `_append_lock`."""
        if not piece:
            return
        if self._thread is None and self._pieces.queued_bytes + len(piece) > self._part_bytes:
            # The thread has a reference to the queue only, so that the finalizer of a dropped writer can end it.
            thread = WorkerThread(
                target=_run_upload, args=(self._put, self._pieces, self._part_bytes), name="ckpt-upload", daemon=True
            )
            start_or_raise(thread, f"the upload of {self._url}")
            self._thread = thread  # set after the start, since commit and abort join it
        if not self._pieces.put(piece):
            self._raise_upload_error()
            raise self._aborted_error()

    def _aborted_error(self) -> StoreError:
        return StoreError(f"uploading {self._url}: the writer was aborted; create a new one")

    def _require_open(self) -> None:
        self._raise_upload_error()
        if self._is_ended:
            raise StoreError(f"uploading {self._url}: the writer was committed or aborted; create a new one")

    def _raise_upload_error(self) -> None:
        error = self._pieces.error
        if isinstance(error, StoreError):
            raise type(error)(str(error)) from error
        if error is not None:
            raise StoreError(
                f"uploading {self._url} failed: {error!r}; check the server of the store, and save again"
            ) from error

    def __del__(self) -> None:
        self._pieces.cancel()


def _run_upload(put: Callable[[bytes | Iterator[bytes], int], None], pieces: _PieceQueue, part_bytes: int) -> None:
    try:
        put(pieces.drain(), part_bytes)
        pieces.is_uploaded = True
    except _Cancelled:
        pass
    except BaseException as error:
        pieces.error = error
    finally:
        pieces.cancel()  # wakes a caller that waits for room


class _Cancelled(Exception):
    """Raised inside the upload to make obstore abort it."""


class _PieceQueue:
    """A queue of byte strings, bounded by their length, that can be finished or cancelled from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.queued_bytes = 0
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        """Guards `_queue` and `_is_cancelled`. Guards changes of `queued_bytes` and `_is_finished`. Notified when one of these
        changes."""
        self._is_finished = False
        self._is_cancelled = False
        self.error: BaseException | None = None
        """The error of the upload if it failed. The uploading thread sets it before it cancels the queue."""
        self.is_uploaded = False
        """Whether the bucket has the whole object. The uploading thread sets it before it ends."""

    def put(self, piece: bytes) -> bool:
        """Wait for room and queue a piece; return False if the queue was cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled or self.queued_bytes < self._limit_bytes)
            if self._is_cancelled:
                return False
            self._queue.append(piece)
            self.queued_bytes += len(piece)
            self._changed.notify_all()
            return True

    def drain(self) -> Iterator[bytes]:
        """Yield the pieces until the queue is finished; raise _Cancelled if it is cancelled."""
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
        """Remove and return all pieces, when no thread drains the queue."""
        with self._changed:
            pieces = list(self._queue)
            self._queue.clear()
            self.queued_bytes = 0
            return pieces

    def finish(self) -> None:
        """Mark the end: no further piece is queued."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Cancel the queue; pieces that were not drained are lost."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
