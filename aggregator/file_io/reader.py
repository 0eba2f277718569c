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

import numpy as np

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.placement import erasure
from ckpt.aggregator.records.file_record import FileLayout, Fragment, PathRecord, Stripe, fragment_bytes
from ckpt.storage.base.checksums import CELL_BYTES, find_bad_cells
from ckpt.storage.base.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Reader

log = logging.getLogger("ckpt")


class FileReader(Reader):
    """A file, opened for reading. It stays what it was when it was opened, or the reading fails."""

    def __init__(self, member_io: MemberIO, path: str, file: PathRecord) -> None:
        self._member_io = member_io
        self._path = path
        self.file = file
        self._stripes: Sequence[Stripe] = ()
        self._starts: list[int] = []
        if file.layout is not None:
            self._stripes = sorted(file.layout.stripes, key=lambda p: p.start)
            self._starts = [p.start for p in self._stripes]
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def read_into(self, position: int, buffer: memoryview) -> int:
        buffer = buffer.cast("B")
        size = self.file.head.nbytes
        count = max(0, min(len(buffer), size - position))
        if self.file.inline_data is not None:
            buffer[:count] = self.file.inline_data[position : position + count]
            return count
        layout = self.file.layout
        done = position
        index = max(0, bisect.bisect_right(self._starts, position) - 1)
        while done < position + count:
            piece = self._stripes[index] if index < len(self._stripes) else None
            if piece is None or done < piece.start:  # between pieces
                until = position + count if piece is None else min(position + count, piece.start)
                np.frombuffer(buffer[done - position : until - position], np.uint8)[:] = 0
                done = until
                continue
            first, last = done - piece.start, min(piece.visible_bytes, position + count - piece.start)
            if first < last:
                assert layout is not None
                self._read_stripe(layout, piece, first, last, buffer[done - position : done - position + last - first])
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

    def _read_stripe(self, layout: FileLayout, stripe: Stripe, first: int, last: int, out: memoryview) -> None:
        failpoint("namespace.read")
        if layout.redundancy.data_fragments == 1:
            self._read_any_copy(layout, stripe, first, last, out)
            return
        length = fragment_bytes(stripe.nbytes, layout.redundancy)
        ranges: dict[int, tuple[int, int, memoryview]] = {}
        for share in range(first // length, -(-last // length)):
            begin, end = max(first, share * length), min(last, (share + 1) * length)
            ranges[share] = (begin - share * length, end - share * length, out[begin - first : end - first])
        got, failed = self._read_fragments(layout, stripe, {s: (b, e) for s, (b, e, _) in ranges.items()}, length, True)
        for share, data in got.items():
            np.copyto(np.frombuffer(ranges[share][2], np.uint8), data)
        if failed:
            read_ranges = {share: (ranges[share][0], data) for share, data in got.items()}
            self._rebuild_ranges(layout, stripe, length, {s: ranges[s] for s in failed}, read_ranges, failed)
        for data in got.values():
            self._member_io.scratch.give_back(data)

    def _read_fragments(
        self, layout: FileLayout, stripe: Stripe, ranges: Mapping[int, tuple[int, int]], length: int, hedge: bool
    ) -> tuple[dict[int, np.ndarray], dict[int, StoreError]]:
        """Ranges of several shares, at once, each into memory of its own: who is late may write there for ever.

        hasty: not to wait for long, since others can stand in.
        """
        by_member = {self._member_of(layout, stripe, s) or f"share {s}": s for s in ranges}

        def read(share: int) -> np.ndarray:
            begin, end = ranges[share]
            into = self._member_io.scratch.take(end - begin)
            self._read_fragment(layout, stripe, share, begin, end, into.data, length)
            return into

        calls = {m: functools.partial(read, s) for m, s in by_member.items()}
        seconds = self._member_io.hedge_after_seconds if hedge else self._member_io.read_timeout_seconds
        answers, errors = self._member_io.read_fan_out.ask(calls, seconds, skip_failed=hedge, mark_late=not hedge)
        return {by_member[m]: data for m, data in answers.items()}, {by_member[m]: e for m, e in errors.items()}

    def _read_any_copy(self, layout: FileLayout, stripe: Stripe, first: int, last: int, out: memoryview) -> None:
        """Read one of the copies. Where that fails, read the next one; where it is slow, read the next one at the same time."""
        copies = self._order_fragments(layout, stripe)
        if len(copies) < 2:
            failing: dict[int, StoreError] = {}
            for copy in copies:
                try:
                    self._read_fragment(layout, stripe, copy, first, last, out, stripe.nbytes)
                    return
                except StoreError as error:
                    failing[copy] = error
            raise self._unreadable_error(layout, stripe, failing)
        failed: dict[int, StoreError] = {}
        asked: dict[Future[None], tuple[int, memoryview]] = {}
        first_view: memoryview | None = None
        until = time.monotonic() + self._member_io.read_timeout_seconds
        while True:
            if copies:
                copy = copies.pop(0)
                into = memoryview(bytearray(last - first)) if asked else out[:]
                if not asked:
                    first_view = into
                call = functools.partial(self._read_fragment, layout, stripe, copy, first, last, into, stripe.nbytes)
                asked[self._member_io.read_fan_out.submit(self._member_of(layout, stripe, copy), call)] = copy, into
            timeout_seconds: float | None = max(0.0, until - time.monotonic())
            if any(into is first_view and self._is_on_this_host(layout, stripe, c) for c, into in asked.values()):
                timeout_seconds = None  # a system call that writes into the caller's memory can't be called back
            elif copies:
                timeout_seconds = min(timeout_seconds or 0.0, self._member_io.hedge_after_seconds)
            done, _ = wait(asked, timeout_seconds, FIRST_COMPLETED)
            for future in done:
                copy, got = asked.pop(future)
                try:
                    future.result()
                except StoreError as error:
                    failed[copy] = error
                    continue
                if got is not first_view:
                    assert first_view is not None
                    _revoke_view(first_view, asked)
                    out[:] = got
                return
            if not copies and (not asked or not done):
                if first_view is not None:
                    _revoke_view(first_view, asked)
                raise self._unreadable_error(layout, stripe, failed)

    def _rebuild_ranges(
        self, layout: FileLayout, stripe: Stripe, length: int, ranges: dict[int, tuple[int, int, memoryview]],
        read_ranges: Mapping[int, tuple[int, np.ndarray]], failed: dict[int, StoreError],
    ) -> None:  # fmt: skip
        """Missing shares from any k others: the same range of each is enough.

        known: what was read of others, and from where on.
        """
        k = layout.redundancy.data_fragments
        begin = min(b for b, _, _ in ranges.values()) // CELL_BYTES * CELL_BYTES
        end = min(length, -(-max(e for _, e, _ in ranges.values()) // CELL_BYTES) * CELL_BYTES)
        usable = {s: data[begin - b : end - b] for s, (b, data) in read_ranges.items() if b <= begin and b + len(data) >= end}
        scratch: list[np.ndarray] = []
        untried = [i for i in self._order_fragments(layout, stripe) if i not in failed and i not in usable]
        last = False
        while len(usable) < k:
            timed_out = [i for i in failed if isinstance(failed[i], Unavailable) and stripe.fragments[i] is not None]
            if not untried and not last:
                untried, last = timed_out, True  # there is no other way
            batch, untried = untried[: k - len(usable)], untried[k - len(usable) :]
            if not batch:
                raise self._unreadable_error(layout, stripe, failed)
            hedge = not last and bool(untried or timed_out)
            got, errors = self._read_fragments(layout, stripe, dict.fromkeys(batch, (begin, end)), length, hedge)
            usable.update(got)
            scratch += got.values()
            failed = {i: error for i, error in failed.items() if i not in got} | errors
        into: dict[int, np.ndarray] = {}
        for share, (b, e, target) in ranges.items():
            if (b, e) == (begin, end):
                into[share] = np.frombuffer(target, np.uint8)
            else:
                into[share] = self._member_io.scratch.take(end - begin)
                scratch.append(into[share])
        erasure.erasure_code(k, layout.redundancy.parity_fragments).reconstruct(usable, into)
        for share, (b, e, target) in ranges.items():
            if (b, e) != (begin, end):
                np.copyto(np.frombuffer(target, np.uint8), into[share][b - begin : e - begin])
        for data in scratch:
            self._member_io.scratch.give_back(data)

    # --- one fragment ------------------------------------------------------------------------------------------

    def _read_fragment(
        self, layout: FileLayout, stripe: Stripe, number: int, first: int, last: int, out: memoryview, length: int
    ) -> None:
        """A range of one fragment, verified."""
        fragment = stripe.fragments[number]
        if fragment is None:
            raise Unavailable("it was lost")
        begin = first // CELL_BYTES * CELL_BYTES
        end = min(length, -(-last // CELL_BYTES) * CELL_BYTES)
        direct = begin == first and end == last
        data = out if direct else memoryview(bytearray(end - begin))
        got = self._open_object(layout, fragment).read_into(fragment.position + begin, data)
        sums = fragment.cell_checksums[begin // CELL_BYTES * 8 : -(-end // CELL_BYTES) * 8]
        if got < len(data) or find_bad_cells(data, sums):
            holder = layout.objects[fragment.object_index]
            how = "damaged" if got == len(data) else "cut"
            problem = f"{holder.name} on {holder.member} is {how} at {fragment.position + begin}"
            log.warning("%s of %s: %s; reading it from elsewhere", self._path, self._member_io.url, problem)
            raise Unavailable(problem)
        if not direct:
            out[:] = data[first - begin : last - begin]

    def _open_object(self, layout: FileLayout, fragment: Fragment) -> Reader:
        reader = self._readers.get(fragment.object_index)
        if reader is None:
            holder = layout.objects[fragment.object_index]
            open_member = self._member_io.open_members.get(holder.member)
            if open_member is None:
                raise Unavailable(f"{holder.member} is no member of {self._member_io.url} any more")
            reader = open_member.store.open(holder.name)
            with self._lock:
                kept = self._readers.setdefault(fragment.object_index, reader)
            if kept is not reader:
                reader.close()
            return kept
        return reader

    def _is_on_this_host(self, layout: FileLayout, stripe: Stripe, number: int) -> bool:
        """Whether a fragment lies in a directory of this host."""
        open_member = self._member_io.open_members.get(self._member_of(layout, stripe, number))
        return open_member is not None and open_member.member.folder is not None

    def _member_of(self, layout: FileLayout, stripe: Stripe, number: int) -> str:
        fragment = stripe.fragments[number]
        return "" if fragment is None else layout.objects[fragment.object_index].member

    def _order_fragments(self, layout: FileLayout, stripe: Stripe) -> list[int]:
        """The fragments that are there: of near members first, of those that do not answer last, the rest in turns."""
        present = [i for i, f in enumerate(stripe.fragments) if f is not None]
        rotation = stripe.start >> 23
        if layout.redundancy.data_fragments > 1:
            rotation = 0  # data before parity
        present = present[rotation % len(present) :] + present[: rotation % len(present)] if present else present

        def cost(number: int) -> tuple[bool, int]:
            member = self._member_of(layout, stripe, number)
            return self._member_io.fan_out.health.is_down(member), -self._member_io.shared_domains(member)

        return sorted(present, key=cost)

    def _unreadable_error(self, layout: FileLayout, stripe: Stripe, failed: dict[int, StoreError]) -> StoreError:
        failed = {i: error for i, error in failed.items() if stripe.fragments[i] is not None}
        reasons = "; ".join(f"{self._member_of(layout, stripe, i)}: {error}" for i, error in sorted(failed.items()))
        present_count = sum(f is not None for f in stripe.fragments)
        damaged = bool(failed) and all("damaged" in str(e) or "cut" in str(e) for e in failed.values())
        message = (
            f"bytes {stripe.start} to {stripe.start + stripe.nbytes} of {self._path} in {self._member_io.url} can't be read: "
            f"{layout.redundancy.data_fragments} of {len(stripe.fragments)} fragments are needed, "
            f"{present_count - len(failed)} answer ({reasons})"
        )
        if damaged:
            raise IntegrityError(message)
        return Unavailable(f"{message}; start the missing members, or run `ckpt-node admin status`")


def _revoke_view(view: memoryview, asked: Mapping[Future[None], tuple[int, memoryview]]) -> None:
    """Make sure that a slow thread writes no more into the caller's memory. It writes what came from a node, piece by piece,
    through this very view; where it reads a file by itself it holds the view meanwhile."""
    try:
        view.release()  # its next write fails
    except BufferError:  # a system call is writing there: that ends
        for future, (_, into) in asked.items():
            if into is view:
                wait([future])
