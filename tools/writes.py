"""A file of a mount that is being written: in any order, each byte once, and made visible whenever that is asked for."""

from __future__ import annotations

import errno
import threading

from ckpt.aggregator.files import INLINE_BYTES, File, same_content
from ckpt.aggregator.namespace import Namespace
from ckpt.aggregator.writing import FileWriter

_PIECE_BYTES = 8 << 20
_WINDOWS = 32
"""Parts of a file that may be incomplete at a time; each takes 8 MiB."""


class _Window:
    """A part of a file in memory, until all of it was written."""

    def __init__(self) -> None:
        self.data = bytearray(_PIECE_BYTES)
        self.filled: list[tuple[int, int]] = []  # in order, apart from each other

    def put(self, begin: int, data: bytes) -> bool:
        """Take bytes; whether the window is full now."""
        end = begin + len(data)
        self.data[begin:end] = data
        apart = [(b, e) for b, e in self.filled if e < begin or b > end]
        touching = [(b, e) for b, e in self.filled if not (e < begin or b > end)]
        merged = (min([begin, *(b for b, _ in touching)]), max([end, *(e for _, e in touching)]))
        self.filled = sorted([*apart, merged])
        return self.filled == [(0, _PIECE_BYTES)]

    def cut(self, end: int) -> None:
        """Forget what lies behind."""
        self.data[end:] = bytes(_PIECE_BYTES - end)
        self.filled = [(b, min(e, end)) for b, e in self.filled if b < end]


class Writing:
    """A file that is being written. What was made visible once can't be changed any more, only written on."""

    def __init__(self, namespace: Namespace, path: str, there: File | None) -> None:
        self.path = path
        self.handles = 0
        self._namespace = namespace
        self._lock = threading.Lock()
        self._removed = False
        self._anew(there)

    def _anew(self, there: File | None) -> None:
        self._there = there
        self._writer: FileWriter | None = None
        self._windows: dict[int, _Window] = {}
        self._stored: set[int] = set()  # windows that are full and gone to the members
        self._solid = 0 if there is None else there.head.nbytes  # nothing below can be changed any more
        self.length = self._solid
        self._dirty = False
        self._failed = False

    def write(self, data: bytes, offset: int) -> int:
        """Take bytes of a place where there are none yet. Raises OSError EOPNOTSUPP where there are."""
        with self._lock:
            if offset < self._solid:
                raise OSError(errno.EOPNOTSUPP, "what a file has can't be changed")
            self._dirty = True
            done = 0
            while done < len(data):
                number, begin = divmod(offset + done, _PIECE_BYTES)
                part = data[done : done + _PIECE_BYTES - begin]
                if number in self._stored or (number not in self._windows and len(self._windows) >= _WINDOWS):
                    raise OSError(errno.EOPNOTSUPP, "each byte is written once, and not in too many places at a time")
                if self._windows.setdefault(number, _Window()).put(begin, part):
                    self._store(number)
                done += len(part)
            self.length = max(self.length, offset + len(data))
        return len(data)

    def cut(self, length: int, anew: bool = False) -> None:
        """ftruncate: empty, longer, or shorter as far as nothing of it is visible yet. Raises Changed where another has changed
        what is to be emptied.

        anew: as O_TRUNC says: what is written from now on replaces whatever is there when it is made visible.
        """
        with self._lock:
            if not length and self.length:
                there = None if anew or self._removed else self._there
                if there is not None and there.head.nbytes:
                    there = self._namespace.empty(self.path, there)
                self._end()
                self._anew(there)
                self._dirty = there is None
                return
            if length < self._solid:
                raise OSError(errno.EOPNOTSUPP, "a file can be emptied, not cut")
            self._dirty = self._dirty or length != self.length
            shorter, self.length = length < self.length, length
            if shorter:
                self._windows = {n: w for n, w in self._windows.items() if n * _PIECE_BYTES < length}
                number, end = divmod(length, _PIECE_BYTES)
                if number in self._windows:
                    self._windows[number].cut(end)
                if any((n + 1) * _PIECE_BYTES > length for n in self._stored):
                    self._publish()  # which cuts it; else it would be there again when the file gets longer

    def publish(self) -> None:
        """Make visible, durably, what was written."""
        with self._lock:
            self._publish()

    def rename(self, path: str) -> None:
        """Give the file, with all that was written until now, another name."""
        with self._lock:
            self._publish()
            self._namespace.rename(self.path, path)
            self.path = path
            before, there = self._there, self._namespace.stat(path)
            # If it is another one by now, what is written from here on must not be added to it, and Changed says so.
            if before is not None and there is not None and same_content(there, before):
                self._there = there

    def remove(self, path: str | None = None) -> None:
        """The name is gone, or (`path`) kept only until the file is closed: what is written from now on is nobody's."""
        with self._lock:
            if path is not None:
                self._namespace.rename(self.path, path)
                self.path = path
            self._removed = True

    def end(self) -> None:
        """Throw away what could not be made visible."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _publish(self) -> None:
        if self._failed:
            raise OSError(errno.EIO, f"{self.path}: a part could not be written before; write it anew")
        if not self._dirty or self._removed:
            return
        self._failed = True  # unless all of this succeeds: where it stopped a second try would not know
        writer = self._begun()
        if self.length <= INLINE_BYTES and not self._stored and (self._there is None or self._there.layout is None):
            window = self._windows.pop(0, None)
            data = bytes(self.length) if window is None else bytes(window.data[: self.length])
            writer.append(memoryview(data)[self._solid :])
        else:
            for number in sorted(self._windows):
                self._store(number)
            writer.cut(self.length)
        self._anew(writer.publish())

    def _store(self, number: int) -> None:
        window = self._windows.pop(number)
        if not window.filled:
            return
        begin = max(window.filled[0][0], self._solid - number * _PIECE_BYTES)
        end = window.filled[-1][1]
        self._begun().write_at(number * _PIECE_BYTES + begin, memoryview(window.data)[begin:end])
        if window.filled == [(0, _PIECE_BYTES)]:
            self._stored.add(number)

    def _begun(self) -> FileWriter:
        if self._writer is None:
            there = self._there
            now = self._namespace.stat(self.path) if there is not None and there.layout is not None else None
            if there is not None and now is not None and now.head.version == there.head.version:
                self._there = now  # a repair may have put its pieces elsewhere
            self._writer = self._namespace.create(self.path, aligned=False, base=self._there)
        return self._writer
