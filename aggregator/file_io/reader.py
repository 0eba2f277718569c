"""The reader of a file: it verifies every cell, and reads another fragment where one fails, is slow or damaged."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ckpt.aggregator.file_io.degraded_read import rebuild_ranges
from ckpt.aggregator.file_io.fragment_reader import FragmentRange, FragmentReader
from ckpt.aggregator.file_io.hedged_read import read_any_copy
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.records.file_record import FileRecord, Stripe, fragment_bytes
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Reader


class FileReader(Reader):
    """A file, opened for reading. It reads the version that was opened; once that is replaced, reads may fail.

    A repair or a drain moves fragments of a version: a read that fails continues with the moved ones. current_record: returns
    the current record of the path.
    """

    def __init__(
        self, member_io: MemberIO, path: str, file: FileRecord, current_record: Callable[[], FileRecord | None]
    ) -> None:
        self._member_io = member_io
        self._path = path
        self._current_record = current_record
        self._opened = _OpenedFile(member_io, path, file)
        self._lock = threading.Lock()
        """Guards changes of `_opened` and `_outdated`."""
        self._outdated: list[_OpenedFile] = []  # other threads may still read with them, so `close` closes them

    @property
    def file(self) -> FileRecord:
        """The record of the file: that with which it was opened, or the one after its fragments were moved."""
        return self._opened.file

    def read_into(self, position: int, buffer: memoryview) -> int:
        buffer = buffer.cast("B")
        opened = self._opened
        while True:
            try:
                return opened.read_into(position, buffer)
            except StoreError:
                moved = self._reopen_if_moved(opened)
                if moved is None:
                    raise
                opened = moved

    def _reopen_if_moved(self, opened: _OpenedFile) -> _OpenedFile | None:
        """Return the file with its current fragments; None if they are those of `opened`, or the file was replaced."""
        try:
            current = self._current_record()
        except CkptError:  # the error of the read says more
            return None
        if current is None or current.head.version != opened.file.head.version or current == opened.file:
            return None
        with self._lock:
            if self._opened.file != current:
                self._outdated.append(self._opened)
                self._opened = _OpenedFile(self._member_io, self._path, current)
            return self._opened

    def close(self) -> None:
        with self._lock:
            every = [self._opened, *self._outdated]
        for opened in every:
            opened.close()


class _OpenedFile:
    """A file with the fragments that one record names. Several threads may use it at once."""

    def __init__(self, member_io: MemberIO, path: str, file: FileRecord) -> None:
        self.file = file
        self._stripes: Sequence[Stripe] = ()
        self._starts: list[int] = []
        self._fragments: FragmentReader | None = None
        if file.layout is not None:
            self._fragments = FragmentReader(member_io, path, file.layout)
            self._stripes = sorted(file.layout.stripes, key=lambda stripe: stripe.start)
            self._starts = [stripe.start for stripe in self._stripes]

    def read_into(self, position: int, buffer: memoryview) -> int:
        """Fill the buffer, as `Reader.read_into` does."""
        size = self.file.head.nbytes
        count = max(0, min(len(buffer), size - position))
        if self.file.inline_data is not None:
            present = self.file.inline_data[position : position + count]
            buffer[:count] = present + bytes(count - len(present))  # an older version has grown such files without a stripe
            return count
        done = position
        index = max(0, bisect.bisect_right(self._starts, position) - 1)
        while done < position + count:
            stripe = self._stripes[index] if index < len(self._stripes) else None
            if stripe is None or done < stripe.start:  # bytes between two stripes are zeros
                end = position + count if stripe is None else min(position + count, stripe.start)
                np.frombuffer(buffer[done - position : end - position], np.uint8)[:] = 0
                done = end
                continue
            first, last = done - stripe.start, min(stripe.visible_bytes, position + count - stripe.start)
            if first < last:
                assert self._fragments is not None
                _read_stripe(self._fragments, stripe, first, last, buffer[done - position : done - position + last - first])
                done = stripe.start + last
            index += 1
        return count

    def close(self) -> None:
        """Close the objects that were opened."""
        if self._fragments is not None:
            self._fragments.close()


def _read_stripe(fragments: FragmentReader, stripe: Stripe, first: int, last: int, out: memoryview) -> None:
    """Read one stripe from byte `first` to before byte `last` into `out`."""
    failpoint("namespace.read")
    redundancy = fragments.layout.redundancy
    if redundancy.data_fragments == 1:
        read_any_copy(fragments, stripe, first, last, out)
        return
    length = fragment_bytes(stripe.nbytes, redundancy)
    ranges: dict[int, FragmentRange] = {}
    for number in range(first // length, -(-last // length)):
        begin, end = max(first, number * length), min(last, (number + 1) * length)
        ranges[number] = FragmentRange(begin - number * length, end - number * length, out[begin - first : end - first])
    got, failed = fragments.read_many(stripe, {i: (each.begin, each.end) for i, each in ranges.items()}, length, True)
    for number, data in got.items():
        np.copyto(np.frombuffer(ranges[number].target, np.uint8), data)
    if failed:
        rebuild_ranges(fragments, stripe, length, ranges, got, failed)
    for data in got.values():
        fragments.member_io.scratch.give_back(data)
