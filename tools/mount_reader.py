"""The class MountReader, a file of a mount that is open for reading."""

from __future__ import annotations

import errno
import threading
from functools import partial

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.reader import FileReader
from ckpt.aggregator.records.file_record import FileRecord, has_same_stripes
from ckpt.storage.base.errors import StoreError


class MountReader:
    """A file that is open for reading. It follows the changes that this mount makes to the file, and what others append to it.

    It must: the kernel caches the pages and the length of a file, not of a handle. It takes a read that is shorter than the
    file for the end of the file, and the next append would begin there. Once this mount has found that another client has
    replaced the file, the handle reads no more: its bytes would be shown to programs that have opened the new file.
    """

    def __init__(self, namespace: Namespace, path: str) -> None:
        self.path = path
        self._namespace = namespace
        self._lock = threading.Lock()
        """Guards changes of all other attributes, which any thread of FUSE may make. It is not held during a call of the
        namespace: a thread that has changed the file does not wait for a look-up by another one, which is repeated if it may
        have missed the change."""
        self._changes = 0
        """How often this mount has changed the file since it was opened."""
        self._followed_changes = 0
        """How many of these changes a look-up has seen that began after them."""
        self._is_replaced = False
        self._reader = namespace.open(path)
        self._former: list[FileReader] = []  # other threads may still read with them, so `close` closes them

    @property
    def file(self) -> FileRecord:
        """The record of the bytes that are read."""
        return self._reader.file

    @property
    def is_outdated(self) -> bool:
        """Whether this mount has changed the file since it was opened, and no look-up has followed the change."""
        return self._followed_changes != self._changes

    def mark_outdated(self) -> None:
        """Let the next read follow a change of this mount, which must be visible by now."""
        with self._lock:
            self._changes += 1

    def rename(self, path: str, is_changed: bool) -> None:
        """Record that this mount has renamed the file. is_changed: it has also changed its bytes, as by `mark_outdated`."""
        with self._lock:
            self.path = path
            self._changes += is_changed

    def require_current(self) -> None:
        """Raise OSError ESTALE if another client has replaced the file."""
        if self.is_outdated:
            while not self._follow():
                pass
        if self._is_replaced:
            raise OSError(errno.ESTALE, "another client has replaced the file: open it again", self.path)

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` visible bytes from `offset` on: fewer at the end of the file. Raises OSError ESTALE."""
        self.require_current()
        data = bytearray(size)
        return bytes(data[: self._reader.read_into(offset, memoryview(data))])

    def _follow(self) -> bool:
        """Read the file that this mount has made, or a later one, from now on. Return False if it was renamed meanwhile.

        Then the path may have another file by now.
        """
        with self._lock:
            path, changes = self.path, self._changes
        current = self._namespace.stat(path)
        reader = self._open(current) if current is not None and self._is_newer(current) else None
        with self._lock:
            if is_found := path == self.path:
                if reader is not None and self._is_newer(reader.file):  # else another thread has followed further
                    self._former.append(self._reader)
                    self._reader, reader = reader, None
                self._followed_changes = max(self._followed_changes, changes)
        if reader is not None:
            reader.close()
        return is_found

    def look_up(self) -> None:
        """Look up the file of the path, and `notice` it."""
        path = self.path
        current = self._namespace.stat(path)
        if current is not None:
            self.notice(path, current)

    def notice(self, path: str, current: FileRecord) -> None:
        """Continue in a file that this mount has just found under a path, if it begins with the opened file."""
        is_decided = False
        while not is_decided:
            with self._lock:
                own, changes = self._reader, self._changes
                if path != self.path or self.is_outdated or not self._is_newer(current):
                    return
            reader = self._open(current)
            is_extended = self._is_extended_by(reader)
            with self._lock:
                is_decided = (own, changes, path) == (self._reader, self._changes, self.path)
                if is_decided and is_extended:
                    self._former.append(self._reader)
                    self._reader = reader
                elif is_decided:
                    self._is_replaced = True
            if not (is_decided and is_extended):
                reader.close()

    def _is_newer(self, current: FileRecord) -> bool:
        """Return whether a record is that of another file, and not of one that the opened file has replaced."""
        known = (self.file.head.version, *self.file.head.history)
        return current.head.kind == "file" and current.head.version not in known

    def _is_extended_by(self, reader: FileReader) -> bool:
        own, other = self.file, reader.file
        if own.inline_data is None:
            if own.layout is None or other.layout is None or own.layout.redundancy != other.layout.redundancy:
                return False
            return has_same_stripes(own.layout.stripes, other.layout.stripes[: len(own.layout.stripes)])
        begin = bytearray(own.head.nbytes)
        try:
            return reader.read_into(0, memoryview(begin)) == len(begin) and begin == own.inline_data
        except StoreError:
            return False

    def _open(self, current: FileRecord) -> FileReader:
        stat = partial(self._namespace.stat, self.path)
        return FileReader(self._namespace.member_io, self.path, current, stat)

    def close(self) -> None:
        """Close the objects that were opened."""
        with self._lock:
            every = [self._reader, *self._former]
        for reader in every:
            reader.close()
