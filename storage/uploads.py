"""Objects that clients of a node are writing: each has a lease, so that a client that vanished pins nothing."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.storage.errors import NoSpace, NotFound, Unavailable
from ckpt.storage.local import LocalStore, LocalWriter


class Upload:
    """One object on its way."""

    def __init__(self, name: str, writer: LocalWriter, reserved: int) -> None:
        self.name = name
        self.writer = writer
        self.reserved = reserved
        self.growing = threading.Lock()
        self.touched = time.monotonic()
        self.busy = 0  # calls that use the writer now


class Uploads:
    """All objects on their way into one store, and the space that is promised to them.

    free: bytes that may still be promised where so many are.
    """

    def __init__(self, store: LocalStore, free: Callable[[int], int], lease_seconds: float) -> None:
        self._store = store
        self._free = free
        self._lease_seconds = lease_seconds
        self._lock = threading.Condition()
        self._uploads: dict[str, Upload] = {}
        self._closed = False

    def create(self, name: str, size_hint: int) -> str:
        """Begin an object; NoSpace where its length would not fit beside what is promised to others."""
        with self._lock:
            if self._closed:
                raise Unavailable("this node is shutting down and takes nothing new")
            free = self._left()
            if size_hint > free:
                raise NoSpace(f"{name} of {size_hint} bytes does not fit: {free} bytes are free on this node")
        upload = Upload(name, self._store.create(name, size_hint), size_hint)
        key = secrets.token_hex(16)
        with self._lock:
            if self._closed:
                upload.writer.abort()
                raise Unavailable("this node is shutting down and takes nothing new")
            self._uploads[key] = upload
        return key

    def append(self, key: str, data: memoryview) -> int:
        """Append to an object; the position of the data in it."""
        upload = self._use(key)
        try:
            return upload.writer.append(data)
        finally:
            self._unuse(upload)

    @contextmanager
    def descriptors(self, key: str) -> Iterator[list[int]]:
        """The open files of an object, for its client to write through, and for nobody else then."""
        upload = self._use(key)
        try:
            yield upload.writer.descriptors()
        finally:
            self._unuse(upload)

    def reserve(self, key: str, needed: int, wanted: int) -> int:
        """Promise space for `wanted` bytes of an object in all, or for fewer, but for no less than `needed`; for how many.

        Raises NoSpace.
        """
        upload = self._use(key)
        try:
            with upload.growing:
                before = upload.reserved
                if needed <= before:
                    return before
                with self._lock:
                    free = self._left()
                    upload.reserved = max(needed, min(wanted, before + free))
                try:
                    if needed > before + free:
                        raise NoSpace(f"{needed - before} more bytes of {upload.name} do not fit: {free} are free on this node")
                    return self._grow(upload, needed)
                except BaseException:
                    upload.reserved = before
                    raise
        finally:
            self._unuse(upload)

    def _grow(self, upload: Upload, needed: int) -> int:
        try:
            upload.writer.reserve(upload.reserved)
        except NoSpace:
            upload.reserved = needed
            upload.writer.reserve(needed)
        return upload.reserved

    def _left(self) -> int:
        """Bytes that may still be promised. Under the lock."""
        return max(0, self._free(sum(u.reserved for u in self._uploads.values())))

    def commit(self, key: str, length: int | None = None) -> int:
        """Make the object durable and visible; its length, which its client says where it has written by itself."""
        upload = self._take(key)
        try:
            return upload.writer.commit(length)
        finally:
            upload.writer.abort()

    def abort(self, key: str) -> None:
        """Throw an object away. Harmless where it is gone."""
        try:
            upload = self._take(key)
        except NotFound:
            return
        upload.writer.abort()

    def expire(self) -> list[str]:
        """Throw away the objects whose clients have been silent for too long; their names."""
        with self._lock:
            late = time.monotonic() - self._lease_seconds
            expired = {k: u for k, u in self._uploads.items() if u.touched < late and not u.busy}
            for key in expired:
                del self._uploads[key]
        for upload in expired.values():
            upload.writer.abort()
        return [upload.name for upload in expired.values()]

    def drain(self, seconds: float) -> int:
        """Take nothing new and wait until all is done; the number of objects that did not make it, which are thrown away."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._uploads, seconds)
            left, self._uploads = list(self._uploads.values()), {}
        for upload in left:
            upload.writer.abort()
        return len(left)

    def __len__(self) -> int:
        return len(self._uploads)

    def _use(self, key: str) -> Upload:
        with self._lock:
            upload = self._uploads.get(key)
            if upload is None:
                raise NotFound(
                    f"there is no upload {key[:8]}: it was committed, or thrown away because nothing came for "
                    f"{self._lease_seconds:g} s; write the object anew"
                )
            upload.busy += 1
            upload.touched = time.monotonic()
            return upload

    def _unuse(self, upload: Upload) -> None:
        with self._lock:
            upload.busy -= 1
            upload.touched = time.monotonic()
            self._lock.notify_all()

    def _take(self, key: str) -> Upload:
        """An upload whose last call this is, once no other uses it."""
        upload = self._use(key)
        with self._lock:
            self._uploads.pop(key, None)
            upload.busy -= 1
            self._lock.wait_for(lambda: not upload.busy, self._lease_seconds)
            self._lock.notify_all()
        return upload
