"""The class MountFile, a file of a mount that is being written: in any order, each byte once, visible on demand."""

from __future__ import annotations

import errno
import threading

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.aggregator.records.file_record import INLINE_FILE_BYTES, FileRecord, has_same_content
from ckpt.tools.mount_reader import MountReader

_WINDOW_BYTES = 8 << 20
_MAX_WINDOWS = 32
"""The most parts of a file that may be incomplete at a time. Each takes 8 MiB."""


class _WriteWindow:
    """A part of a file in memory, until all its bytes are written."""

    def __init__(self) -> None:
        self.data = bytearray(_WINDOW_BYTES)
        self.filled: list[tuple[int, int]] = []  # the written ranges (begin, end), in order and not adjacent

    def put(self, begin: int, data: bytes) -> bool:
        """Store bytes at an offset; return whether the window is full now."""
        end = begin + len(data)
        self.data[begin:end] = data
        separate = [(b, e) for b, e in self.filled if e < begin or b > end]
        touching = [(b, e) for b, e in self.filled if not (e < begin or b > end)]
        merged = (min([begin, *(b for b, _ in touching)]), max([end, *(e for _, e in touching)]))
        self.filled = sorted([*separate, merged])
        return self.filled == [(0, _WINDOW_BYTES)]

    def truncate(self, end: int) -> None:
        """Discard the bytes from `end` on."""
        self.data[end:] = bytes(_WINDOW_BYTES - end)
        self.filled = [(b, min(e, end)) for b, e in self.filled if b < end]

    def copy_into(self, out: bytearray, position: int) -> None:
        """Copy the written bytes to `out`, whose first byte has this position in the window."""
        for b, e in self.filled:
            begin, end = max(b, position), min(e, position + len(out))
            if begin < end:
                out[begin - position : end - position] = self.data[begin:end]


class MountFile:
    """A file that is being written. Bytes that are visible can't be changed any more, but more can be appended.

    base: the record of the existing file to which the writes are appended; None if they replace it.
    """

    def __init__(self, namespace: Namespace, path: str, base: FileRecord | None) -> None:
        self.path = path
        self.handles = 0
        self._namespace = namespace
        self._lock = threading.Lock()
        """Guards `_base`, `_writer`, `_windows`, `_stored`, `_fixed_bytes`, `_is_dirty`, `_has_failed` and `_is_removed`.
        Guards changes of `length` and `path`."""
        self._is_removed = False
        self._reset(base)

    def _reset(self, base: FileRecord | None) -> None:
        """Begin to write after `base`. Needs `_lock`."""
        self._base = base
        self._writer: FileWriter | None = None
        self._windows: dict[int, _WriteWindow] = {}
        self._stored: set[int] = set()  # windows that are full and written to the members
        self._fixed_bytes = 0 if base is None else base.head.nbytes  # bytes below this offset can't be changed
        self.length = self._fixed_bytes
        self._is_dirty = False
        self._has_failed = False

    @property
    def has_unsynced_writes(self) -> bool:
        """Whether writes are not durable, of a file that still has a name."""
        with self._lock:
            return self._is_dirty and not self._is_removed

    def write(self, data: bytes, offset: int) -> int:
        """Write bytes at an offset, and return their number. Raises OSError EOPNOTSUPP if that would change visible bytes."""
        with self._lock:
            if offset < self._fixed_bytes:
                raise OSError(errno.EOPNOTSUPP, "the bytes of a file can't be changed")
            self._is_dirty = True
            done = 0
            while done < len(data):
                number, begin = divmod(offset + done, _WINDOW_BYTES)
                part = data[done : done + _WINDOW_BYTES - begin]
                if number in self._stored or (number not in self._windows and len(self._windows) >= _MAX_WINDOWS):
                    raise OSError(errno.EOPNOTSUPP, "each byte can be written once, and not in too many places at a time")
                if self._windows.setdefault(number, _WriteWindow()).put(begin, part):
                    self._store_window(number)
                done += len(part)
            self.length = max(self.length, offset + len(data))
        return len(data)

    def read(self, offset: int, size: int, reader: MountReader) -> bytes:
        """Return bytes of the file as this mount has written it, whether they are visible yet or not.

        Bytes that were sent to the members become visible first. reader: reads the visible bytes. If another client has changed
        the file, only those are returned.

        Raises OSError: EBUSY where bytes before them were not written, because they could not be written any more, and ESTALE.
        """
        numbers = range(offset // _WINDOW_BYTES, -(-(offset + size) // _WINDOW_BYTES))
        with self._lock:
            if not self._stored.isdisjoint(numbers):
                self._require_readable()
                self._publish()
                reader.mark_outdated()
            reader.require_current()
            if self._base is not None and not has_same_content(reader.file, self._base):
                reader.look_up()
            if self._is_dirty and (self._base is None or has_same_content(reader.file, self._base)):
                return self._read_unpublished(offset, size, reader)
        return reader.read(offset, size)

    def _require_readable(self) -> None:
        """Raise OSError if the bytes that were sent to the members can't become visible now. Needs `_lock`."""
        if self._is_removed:
            raise OSError(errno.EIO, f"{self.path}: what was written to a removed file can't be read")
        written = self._stored.union(self._windows)
        last = max(written)
        has_gap = len(written) <= last - self._fixed_bytes // _WINDOW_BYTES  # a window in front of the last one has no bytes
        for number, window in self._windows.items():
            first = max(0, self._fixed_bytes - number * _WINDOW_BYTES)
            begin, end = window.filled[0] if window.filled else (first, first)
            has_gap |= len(window.filled) > 1 or begin > first or (number < last and end < _WINDOW_BYTES)
        if has_gap:
            raise OSError(errno.EBUSY, f"{self.path}: the file is being written, and bytes before its end are missing")

    def _read_unpublished(self, offset: int, size: int, reader: MountReader) -> bytes:
        """Return bytes of which some are only in windows. Needs `_lock`."""
        if self._has_failed:
            raise OSError(errno.EIO, f"{self.path}: an earlier write failed; write the file again")
        data = bytearray(max(0, min(size, self.length - offset)))
        visible = reader.read(offset, max(0, min(len(data), self._fixed_bytes - offset)))
        data[: len(visible)] = visible
        for number, window in self._windows.items():
            window.copy_into(data, offset - number * _WINDOW_BYTES)
        return bytes(data)

    def truncate(self, length: int, replace: bool = False) -> None:
        """Set the length of the file, as ftruncate does. It may become empty, longer, or shorter if the end is not visible yet.

        replace: as with O_TRUNC, later writes replace the file at the time when they become visible, whatever it is then.

        Raises Changed if another client has changed a file that should become empty, and OSError EOPNOTSUPP for another length.
        """
        with self._lock:
            if not length and self.length:
                base = None if replace or self._is_removed else self._base
                if base is not None and base.head.nbytes:
                    base = self._namespace.truncate(self.path, base)
                self._abort()
                self._reset(base)
                self._is_dirty = base is None
                return
            if length < self._fixed_bytes:
                raise OSError(errno.EOPNOTSUPP, "a file can be emptied, but not shortened")
            self._is_dirty = self._is_dirty or length != self.length
            shorter, self.length = length < self.length, length
            if shorter:
                self._windows = {n: w for n, w in self._windows.items() if n * _WINDOW_BYTES < length}
                number, end = divmod(length, _WINDOW_BYTES)
                if number in self._windows:
                    self._windows[number].truncate(end)
                if any((n + 1) * _WINDOW_BYTES > length for n in self._stored):
                    self._publish()  # truncates the stored windows; otherwise their bytes reappear if the file grows again

    def publish(self) -> None:
        """Make the writes durable and visible. Raises StoreError or OSError if that fails."""
        with self._lock:
            self._publish()

    def rename(self, path: str) -> None:
        """Make the writes durable and visible, and then rename the file."""
        with self._lock:
            self._publish()
            self._namespace.rename(self.path, path)
            self.path = path
            base, current = self._base, self._namespace.stat(path)
            # If the name has another file by now, later writes must not be appended to it: they raise Changed.
            if base is not None and current is not None and has_same_content(current, base):
                self._base = current

    def remove(self, path: str | None = None) -> None:
        """Record that the file was deleted: later writes are discarded.

        path: the name under which the file stays until it is closed; None if it has no name any more.
        """
        with self._lock:
            if path is not None:
                self._namespace.rename(self.path, path)
                self.path = path
            self._is_removed = True

    def discard(self) -> None:
        """Discard the writes that are not visible yet."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        """Discard what was written to the members. Needs `_lock`."""
        if self._writer is not None:
            self._writer.abort()

    def _publish(self) -> None:
        """Make the writes durable and visible. Needs `_lock`."""
        if self._has_failed:
            raise OSError(errno.EIO, f"{self.path}: an earlier write failed; write the file again")
        if not self._is_dirty or self._is_removed:
            return
        self._has_failed = True  # until all of this succeeds, because a second try would not know what is missing
        writer = self._ensure_writer()
        if self.length <= INLINE_FILE_BYTES and not self._stored and (self._base is None or self._base.layout is None):
            window = self._windows.pop(0, None)
            data = bytes(self.length) if window is None else bytes(window.data[: self.length])
            writer.append(memoryview(data)[self._fixed_bytes :])
        else:
            for number in sorted(self._windows):
                self._store_window(number)
            writer.truncate(self.length)
        self._reset(writer.publish())

    def _store_window(self, number: int) -> None:
        """Write the bytes of a window to the members. If that fails, the window keeps them. Needs `_lock`."""
        window = self._windows[number]
        if window.filled:
            begin = max(window.filled[0][0], self._fixed_bytes - number * _WINDOW_BYTES)
            end = window.filled[-1][1]
            self._ensure_writer().write_at(number * _WINDOW_BYTES + begin, memoryview(window.data)[begin:end])
            if window.filled == [(0, _WINDOW_BYTES)]:
                self._stored.add(number)
        del self._windows[number]

    def _ensure_writer(self) -> FileWriter:
        """Return the writer, which is created when it is first needed. Needs `_lock`."""
        if self._writer is None:
            base = self._base
            current = self._namespace.stat(self.path) if base is not None and base.layout is not None else None
            if base is not None and current is not None and current.head.version == base.head.version:
                self._base = current  # a repair may have moved its fragments
            self._writer = self._namespace.create(self.path, aligned=False, base=self._base)
        return self._writer
