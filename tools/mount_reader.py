"""The class MountReader, a file of a mount that is open for reading."""

from __future__ import annotations

import threading
from functools import partial

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.reader import FileReader
from ckpt.aggregator.records.file_record import PathRecord


class MountReader:
    """A file that is open for reading. It follows the changes that this mount makes to the file.

    It must: the kernel caches the pages and the length of a file, not of a handle. It takes a read that is shorter than the file
    for the end of the file, and the next append would begin there.
    """

    def __init__(self, namespace: Namespace, path: str) -> None:
        self.path = path
        self.is_outdated = False
        """Whether this mount has changed the file since it was opened."""
        self._namespace = namespace
        self._lock = threading.Lock()
        """Guards changes of `_reader` and `_former`."""
        self._reader = namespace.open(path)
        self._former: list[FileReader] = []  # other threads may still read with them, so `close` closes them

    @property
    def file(self) -> PathRecord:
        """The record of the bytes that are read."""
        return self._reader.file

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` visible bytes from `offset` on: fewer at the end of the file."""
        if self.is_outdated:
            self.refresh()
        data = bytearray(size)
        return bytes(data[: self._reader.read_into(offset, memoryview(data))])

    def refresh(self) -> None:
        """Read the current file of the path from now on, if there is one."""
        current = self._namespace.stat(self.path)
        with self._lock:
            self.is_outdated = False
            if current is None or current.head.kind != "file" or current.head.version == self.file.head.version:
                return
            self._former.append(self._reader)
            stat = partial(self._namespace.stat, self.path)
            self._reader = FileReader(self._namespace.member_io, self.path, current, stat)

    def close(self) -> None:
        """Close the objects that were opened."""
        with self._lock:
            every = [self._reader, *self._former]
        for reader in every:
            reader.close()
