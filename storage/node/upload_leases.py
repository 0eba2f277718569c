"""The uploads of a node: each has a lease, so that an upload whose client has vanished is discarded."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckpt.storage.base.errors import NoSpace, NotFound, Unavailable
from ckpt.storage.base.store import ALIGNMENT
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import LocalWriter

FULL_ADVICE = "free space on its device, or add a node"
SHUTTING_DOWN = "this node is shutting down; write to another node, or start it again"
"""The message of a node that accepts no new upload."""


class LeasedUpload:
    """One object that a client is writing."""

    def __init__(self, name: str, writer: LocalWriter, reserved_bytes: int) -> None:
        self.name = name
        self.writer = writer
        self.reserved_bytes = reserved_bytes
        self.appended_bytes = 0
        """The end of the last append over the wire, rounded up to the start of the next one."""
        self.reserve_lock = threading.Lock()
        """Taken while space is reserved, so that the calls of one upload do so one after the other. Guards changes of
        `appended_bytes`, and, together with the lock of UploadLeases, of `reserved_bytes`."""
        self.touched_at = time.monotonic()
        self.active_calls = 0  # the number of calls that use the writer now


class UploadLeases:
    """All uploads to one store, and the space that is reserved for them. It may be used from many threads.

    A call with the key of an upload raises NotFound if the upload was committed or discarded; `abort` then does nothing.

    unreserved_bytes: returns how many bytes may still be reserved, given how many are reserved.
    lease_seconds: how long an upload is kept without a call of its client.
    """

    def __init__(self, store: LocalStore, unreserved_bytes: Callable[[int], int], lease_seconds: float) -> None:
        self._store = store
        self._unreserved_bytes = unreserved_bytes
        self._lease_seconds = lease_seconds
        self._changed = threading.Condition()
        """Guards changes of `_uploads`, `_unlisted_bytes`, `_is_closed`, and of the calls and times of each upload. Notified
        when a call of an upload ends."""
        self._uploads: dict[str, LeasedUpload] = {}
        self._unlisted_bytes: dict[str, int] = {}
        """The reserved bytes of each object that is being put, and of each upload whose file is being created or ended."""
        self._is_closed = False

    def create(self, name: str, size_hint: int) -> str:
        """Begin an upload and return its key.

        Raises NoSpace if it needs more space than other uploads have left, and Unavailable while the node shuts down.
        """
        with self.reserved(name, size_hint) as key:
            upload = LeasedUpload(name, self._store.create(name, size_hint), size_hint)
            with self._changed:
                if not self._is_closed:
                    self._uploads[key] = upload
                    del self._unlisted_bytes[key]
                    return key
        upload.writer.abort()
        raise Unavailable(SHUTTING_DOWN)

    @contextmanager
    def reserved(self, name: str, nbytes: int) -> Iterator[str]:
        """A context in which these bytes count as reserved for an object, under the key that it gives.

        Raises NoSpace if they do not fit, and Unavailable while the node shuts down.
        """
        key = secrets.token_hex(16)
        with self._changed:
            if self._is_closed:
                raise Unavailable(SHUTTING_DOWN)
            if nbytes > (free := self._free_bytes()):
                raise NoSpace(f"{name} of {nbytes} bytes does not fit: {free} bytes are free on this node; {FULL_ADVICE}")
            self._unlisted_bytes[key] = nbytes
        try:
            yield key
        finally:
            with self._changed:
                self._unlisted_bytes.pop(key, None)

    def append(self, key: str, data: memoryview) -> int:
        """Append to an upload, and return the position of the data in the object. Raises NotFound and NoSpace."""
        upload = self._acquire(key)
        try:
            with upload.reserve_lock:
                end = upload.appended_bytes + len(data)
                self._reserve(upload, end, end)
                upload.appended_bytes = -(-end // ALIGNMENT) * ALIGNMENT
            return upload.writer.append(data)
        finally:
            self._release(upload)

    @contextmanager
    def descriptors(self, key: str) -> Iterator[list[int]]:
        """A context with the descriptors of an upload, through which its client writes from then on."""
        upload = self._acquire(key)
        try:
            yield upload.writer.descriptors()
        finally:
            self._release(upload)

    def reserve(self, key: str, needed_bytes: int, requested_bytes: int) -> int:
        """Return the total bytes that are reserved for an upload. If they are fewer than `needed_bytes`, reserve more first.

        More is up to `requested_bytes` in total, as far as there is space.

        Raises NoSpace if `needed_bytes` in total do not fit.
        """
        upload = self._acquire(key)
        try:
            with upload.reserve_lock:
                return self._reserve(upload, needed_bytes, requested_bytes)
        finally:
            self._release(upload)

    def _reserve(self, upload: LeasedUpload, needed_bytes: int, requested_bytes: int) -> int:
        """Reserve space as `reserve` does. Needs `reserve_lock`."""
        before = upload.reserved_bytes
        if needed_bytes <= before:
            return before
        with self._changed:
            free = self._free_bytes()
            if needed_bytes > before + free:
                raise NoSpace(
                    f"{needed_bytes - before} more bytes of {upload.name} do not fit: {free} are free on this "
                    f"node; {FULL_ADVICE}"
                )
            upload.reserved_bytes = max(needed_bytes, min(requested_bytes, before + free))
        try:
            return self._reserve_file(upload, needed_bytes)
        except BaseException:
            with self._changed:
                upload.reserved_bytes = before
            raise

    def _reserve_file(self, upload: LeasedUpload, needed_bytes: int) -> int:
        try:
            upload.writer.reserve(upload.reserved_bytes)
        except NoSpace:
            with self._changed:
                upload.reserved_bytes = needed_bytes
            upload.writer.reserve(needed_bytes)
        return upload.reserved_bytes

    def free_bytes(self) -> int:
        """Return the bytes that are free, and not reserved for uploads."""
        with self._changed:
            return self._free_bytes()

    def _free_bytes(self) -> int:
        """Return the bytes that may still be reserved. Needs `_changed`."""
        reserved = sum(u.reserved_bytes for u in self._uploads.values()) + sum(self._unlisted_bytes.values())
        return max(0, self._unreserved_bytes(reserved))

    def commit(self, key: str, length: int | None = None) -> int:
        """Make the object durable and visible, and return its length.

        length: the length in bytes if the client wrote through descriptors; None otherwise.

        Raises NotFound, and StoreError if the object can't be made durable: the upload is discarded then.
        """
        with self._ending(key) as upload:
            try:
                return upload.writer.commit(length)
            finally:
                upload.writer.abort()

    def abort(self, key: str) -> None:
        """Discard an upload. Does nothing if it does not exist any more."""
        with suppress(NotFound), self._ending(key) as upload:
            upload.writer.abort()

    def expire(self) -> list[str]:
        """Discard the uploads whose leases have expired, and return the names of their objects."""
        with self._changed:
            oldest_allowed = time.monotonic() - self._lease_seconds
            expired = {k: u for k, u in self._uploads.items() if u.touched_at < oldest_allowed and not u.active_calls}
            for key in expired:
                del self._uploads[key]
        _abort_all(expired.values())
        return [upload.name for upload in expired.values()]

    def drain(self, seconds: float) -> int:
        """Refuse new uploads and wait up to `seconds` for the running ones; discard the rest, and return how many."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._uploads, seconds)
            unfinished, self._uploads = list(self._uploads.values()), {}
        _abort_all(unfinished)
        return len(unfinished)

    def __len__(self) -> int:
        return len(self._uploads)

    def _acquire(self, key: str) -> LeasedUpload:
        with self._changed:
            upload = self._uploads.get(key)
            if upload is None:
                raise NotFound(
                    f"there is no upload {key[:8]}: it was committed, or discarded because its client sent nothing for "
                    f"{self._lease_seconds:g} s; write the object again"
                )
            upload.active_calls += 1
            upload.touched_at = time.monotonic()
            return upload

    def _release(self, upload: LeasedUpload) -> None:
        with self._changed:
            upload.active_calls -= 1
            upload.touched_at = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def _ending(self, key: str) -> Iterator[LeasedUpload]:
        """A context for the last call of an upload, which begins when no other call uses it. Its bytes stay reserved."""
        upload = self._acquire(key)
        try:
            with self._changed:
                self._uploads.pop(key, None)
                self._unlisted_bytes[key] = upload.reserved_bytes
                upload.active_calls -= 1
                self._changed.wait_for(lambda: not upload.active_calls, self._lease_seconds)
                self._changed.notify_all()
            yield upload
        finally:
            with self._changed:
                self._unlisted_bytes.pop(key, None)


def _abort_all(uploads: Iterable[LeasedUpload]) -> None:
    """Discard uploads; an error of one, which is raised at the end, skips none of the others."""
    with ExitStack() as aborts:
        for upload in uploads:
            aborts.callback(upload.writer.abort)
