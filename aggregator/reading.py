"""Reading a file of the namespace: every cell verified, from another member where one fails, is slow or is wrong."""

from __future__ import annotations

import bisect
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ckpt.aggregator import erasure
from ckpt.aggregator.files import File, Fragment, Layout, Piece, share_bytes
from ckpt.storage.base import Reader
from ckpt.storage.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.sums import CELL_BYTES, bad_cells

if TYPE_CHECKING:
    from ckpt.aggregator.namespace import Namespace

log = logging.getLogger("ckpt")


class FileReader(Reader):
    """A file, opened for reading. It stays what it was when it was opened, or the reading fails."""

    def __init__(self, namespace: Namespace, path: str, file: File) -> None:
        self._namespace = namespace
        self._path = path
        self.file = file
        self._pieces: Sequence[Piece] = ()
        self._starts: list[int] = []
        if file.layout is not None:
            self._pieces = sorted(file.layout.pieces, key=lambda p: p.start)
            self._starts = [p.start for p in self._pieces]
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def read_into(self, position: int, buffer: memoryview) -> int:
        buffer = buffer.cast("B")
        size = self.file.head.nbytes
        count = max(0, min(len(buffer), size - position))
        if self.file.data is not None:
            buffer[:count] = self.file.data[position : position + count]
            return count
        layout = self.file.layout
        done = position
        index = max(0, bisect.bisect_right(self._starts, position) - 1)
        while done < position + count:
            piece = self._pieces[index] if index < len(self._pieces) else None
            if piece is None or done < piece.start:  # between pieces
                until = position + count if piece is None else min(position + count, piece.start)
                np.frombuffer(buffer[done - position : until - position], np.uint8)[:] = 0
                done = until
                continue
            first, last = done - piece.start, min(piece.reach, position + count - piece.start)
            if first < last:
                assert layout is not None
                self._read(layout, piece, first, last, buffer[done - position : done - position + last - first])
                done = piece.start + last
            index += 1
        return count

    def close(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            with suppress(StoreError):
                reader.close()

    # --- one piece ---------------------------------------------------------------------------------------------

    def _read(self, layout: Layout, piece: Piece, first: int, last: int, out: memoryview) -> None:
        failpoint("namespace.read")
        if layout.redundancy.data == 1:
            self._any_copy(layout, piece, first, last, out)
            return
        length = share_bytes(piece.nbytes, layout.redundancy)
        wanted: dict[int, tuple[int, int, memoryview]] = {}
        for share in range(first // length, -(-last // length)):
            begin, end = max(first, share * length), min(last, (share + 1) * length)
            wanted[share] = (begin - share * length, end - share * length, out[begin - first : end - first])
        got, failed = self._shares(layout, piece, {s: (b, e) for s, (b, e, _) in wanted.items()}, length, True)
        for share, data in got.items():
            np.copyto(np.frombuffer(wanted[share][2], np.uint8), data)
        if failed:
            known = {share: (wanted[share][0], data) for share, data in got.items()}
            self._rebuild(layout, piece, length, {s: wanted[s] for s in failed}, known, failed)
        for data in got.values():
            self._namespace.give_scratch(data)

    def _shares(
        self, layout: Layout, piece: Piece, ranges: Mapping[int, tuple[int, int]], length: int, hasty: bool
    ) -> tuple[dict[int, np.ndarray], dict[int, StoreError]]:
        """Ranges of several shares, at once, each into memory of its own: who is late may write there for ever.

        hasty: not to wait for long, since others can stand in.
        """
        by_member = {self._member(layout, piece, s) or f"share {s}": s for s in ranges}

        def read(share: int) -> np.ndarray:
            begin, end = ranges[share]
            into = self._namespace.take_scratch(end - begin)
            self._share(layout, piece, share, begin, end, into.data, length)
            return into

        calls = {m: functools.partial(read, s) for m, s in by_member.items()}
        seconds = self._namespace.hedge_seconds if hasty else self._namespace.read_seconds
        answers, errors = self._namespace.reads.ask(calls, seconds, spare=hasty, blame=not hasty)
        return {by_member[m]: data for m, data in answers.items()}, {by_member[m]: e for m, e in errors.items()}

    def _any_copy(self, layout: Layout, piece: Piece, first: int, last: int, out: memoryview) -> None:
        """One of the copies; the next one where that fails, and beside it where that is slow."""
        copies = self._in_order(layout, piece)
        if len(copies) < 2:
            failing: dict[int, StoreError] = {}
            for copy in copies:
                try:
                    self._share(layout, piece, copy, first, last, out, piece.nbytes)
                    return
                except StoreError as error:
                    failing[copy] = error
            raise self._lost(layout, piece, failing)
        failed: dict[int, StoreError] = {}
        asked: dict[Future[None], tuple[int, memoryview]] = {}
        first_view: memoryview | None = None
        until = time.monotonic() + self._namespace.read_seconds
        while True:
            if copies:
                copy = copies.pop(0)
                into = memoryview(bytearray(last - first)) if asked else out[:]
                if not asked:
                    first_view = into
                call = functools.partial(self._share, layout, piece, copy, first, last, into, piece.nbytes)
                asked[self._namespace.reads.submit(self._member(layout, piece, copy), call)] = copy, into
            left: float | None = max(0.0, until - time.monotonic())
            if any(into is first_view and self._is_here(layout, piece, c) for c, into in asked.values()):
                left = None  # a system call that writes into the caller's memory can't be called back
            elif copies:
                left = min(left or 0.0, self._namespace.hedge_seconds)
            done, _ = wait(asked, left, FIRST_COMPLETED)
            for future in done:
                copy, got = asked.pop(future)
                try:
                    future.result()
                except StoreError as error:
                    failed[copy] = error
                    continue
                if got is not first_view:
                    assert first_view is not None
                    _take_back(first_view, asked)
                    out[:] = got
                return
            if not copies and (not asked or not done):
                if first_view is not None:
                    _take_back(first_view, asked)
                raise self._lost(layout, piece, failed)

    def _rebuild(
        self, layout: Layout, piece: Piece, length: int, wanted: dict[int, tuple[int, int, memoryview]],
        known: Mapping[int, tuple[int, np.ndarray]], failed: dict[int, StoreError],
    ) -> None:  # fmt: skip
        """Missing shares from any k others: the same range of each is enough.

        known: what was read of others, and from where on.
        """
        k = layout.redundancy.data
        begin = min(b for b, _, _ in wanted.values()) // CELL_BYTES * CELL_BYTES
        end = min(length, -(-max(e for _, e, _ in wanted.values()) // CELL_BYTES) * CELL_BYTES)
        good = {s: data[begin - b : end - b] for s, (b, data) in known.items() if b <= begin and b + len(data) >= end}
        scratch: list[np.ndarray] = []
        left = [i for i in self._in_order(layout, piece) if i not in failed and i not in good]
        last = False
        while len(good) < k:
            late = [i for i in failed if isinstance(failed[i], Unavailable) and piece.fragments[i] is not None]
            if not left and not last:
                left, last = late, True  # there is no other way
            batch, left = left[: k - len(good)], left[k - len(good) :]
            if not batch:
                raise self._lost(layout, piece, failed)
            hasty = not last and bool(left or late)
            got, errors = self._shares(layout, piece, dict.fromkeys(batch, (begin, end)), length, hasty)
            good.update(got)
            scratch += got.values()
            failed = {i: error for i, error in failed.items() if i not in got} | errors
        into: dict[int, np.ndarray] = {}
        for share, (b, e, target) in wanted.items():
            if (b, e) == (begin, end):
                into[share] = np.frombuffer(target, np.uint8)
            else:
                into[share] = self._namespace.take_scratch(end - begin)
                scratch.append(into[share])
        erasure.code(k, layout.redundancy.parity).rebuild(good, into)
        for share, (b, e, target) in wanted.items():
            if (b, e) != (begin, end):
                np.copyto(np.frombuffer(target, np.uint8), into[share][b - begin : e - begin])
        for data in scratch:
            self._namespace.give_scratch(data)

    # --- one fragment ------------------------------------------------------------------------------------------

    def _share(self, layout: Layout, piece: Piece, number: int, first: int, last: int, out: memoryview, length: int) -> None:
        """A range of one fragment, verified."""
        fragment = piece.fragments[number]
        if fragment is None:
            raise Unavailable("it was lost")
        begin = first // CELL_BYTES * CELL_BYTES
        end = min(length, -(-last // CELL_BYTES) * CELL_BYTES)
        direct = begin == first and end == last
        data = out if direct else memoryview(bytearray(end - begin))
        got = self._reader(layout, fragment).read_into(fragment.position + begin, data)
        sums = fragment.cells[begin // CELL_BYTES * 8 : -(-end // CELL_BYTES) * 8]
        if got < len(data) or bad_cells(data, sums):
            holder = layout.holders[fragment.holder]
            how = "damaged" if got == len(data) else "cut"
            told = f"{holder.name} on {holder.member} is {how} at {fragment.position + begin}"
            log.warning("%s of %s: %s; reading it from elsewhere", self._path, self._namespace.url, told)
            raise Unavailable(told)
        if not direct:
            out[:] = data[first - begin : last - begin]

    def _reader(self, layout: Layout, fragment: Fragment) -> Reader:
        reader = self._readers.get(fragment.holder)
        if reader is None:
            holder = layout.holders[fragment.holder]
            place = self._namespace.places.get(holder.member)
            if place is None:
                raise Unavailable(f"{holder.member} is no member of {self._namespace.url} any more")
            reader = place.store.open(holder.name)
            with self._lock:
                kept = self._readers.setdefault(fragment.holder, reader)
            if kept is not reader:
                reader.close()
            return kept
        return reader

    def _is_here(self, layout: Layout, piece: Piece, number: int) -> bool:
        """Whether a fragment lies in a directory of this host."""
        place = self._namespace.places.get(self._member(layout, piece, number))
        return place is not None and place.member.folder is not None

    def _member(self, layout: Layout, piece: Piece, number: int) -> str:
        fragment = piece.fragments[number]
        return "" if fragment is None else layout.holders[fragment.holder].member

    def _in_order(self, layout: Layout, piece: Piece) -> list[int]:
        """The fragments that are there: of near members first, of those that do not answer last, the rest in turns."""
        here = [i for i, f in enumerate(piece.fragments) if f is not None]
        turn = piece.start >> 23
        if layout.redundancy.data > 1:
            turn = 0  # data before parity
        here = here[turn % len(here) :] + here[: turn % len(here)] if here else here

        def cost(number: int) -> tuple[bool, int]:
            member = self._member(layout, piece, number)
            return self._namespace.fan_out.health.down(member), -self._namespace.nearness(member)

        return sorted(here, key=cost)

    def _lost(self, layout: Layout, piece: Piece, failed: dict[int, StoreError]) -> StoreError:
        failed = {i: error for i, error in failed.items() if piece.fragments[i] is not None}
        reasons = "; ".join(f"{self._member(layout, piece, i)}: {error}" for i, error in sorted(failed.items()))
        there = sum(f is not None for f in piece.fragments)
        damaged = bool(failed) and all("damaged" in str(e) or "cut" in str(e) for e in failed.values())
        message = (
            f"bytes {piece.start} to {piece.start + piece.nbytes} of {self._path} in {self._namespace.url} can't be read: "
            f"{layout.redundancy.data} of {len(piece.fragments)} fragments are needed, {there - len(failed)} answer ({reasons})"
        )
        if damaged:
            raise IntegrityError(message)
        return Unavailable(f"{message}; start the missing members, or run `ckpt-node admin status`")


def _take_back(view: memoryview, asked: Mapping[Future[None], tuple[int, memoryview]]) -> None:
    """Make sure that a slow thread writes no more into the caller's memory. It writes what came from a node, piece by piece,
    through this very view; where it reads a file by itself it holds the view meanwhile."""
    try:
        view.release()  # its next write fails
    except BufferError:  # a system call is writing there: that ends
        for future, (_, into) in asked.items():
            if into is view:
                wait([future])
