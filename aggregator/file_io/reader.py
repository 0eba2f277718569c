"""The reader of a file: it verifies every cell, and reads another fragment where one fails, is slow or damaged."""

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
    """A file, opened for reading. It reads the version that was opened; once that is replaced, reads may fail."""

    def __init__(self, member_io: MemberIO, path: str, file: PathRecord) -> None:
        self._member_io = member_io
        self._path = path
        self.file = file
        self._stripes: Sequence[Stripe] = ()
        self._starts: list[int] = []
        if file.layout is not None:
            self._stripes = sorted(file.layout.stripes, key=lambda stripe: stripe.start)
            self._starts = [stripe.start for stripe in self._stripes]
        self._readers: dict[int, Reader] = {}  # by the index of the member object
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
            stripe = self._stripes[index] if index < len(self._stripes) else None
            if stripe is None or done < stripe.start:  # bytes between two stripes are zeros
                end = position + count if stripe is None else min(position + count, stripe.start)
                np.frombuffer(buffer[done - position : end - position], np.uint8)[:] = 0
                done = end
                continue
            first, last = done - stripe.start, min(stripe.visible_bytes, position + count - stripe.start)
            if first < last:
                assert layout is not None
                self._read_stripe(layout, stripe, first, last, buffer[done - position : done - position + last - first])
                done = stripe.start + last
            index += 1
        return count

    def close(self) -> None:
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            with suppress(StoreError):
                reader.close()

    # --- one stripe --------------------------------------------------------------------------------------------

    def _read_stripe(self, layout: FileLayout, stripe: Stripe, first: int, last: int, out: memoryview) -> None:
        failpoint("namespace.read")
        if layout.redundancy.data_fragments == 1:
            self._read_any_copy(layout, stripe, first, last, out)
            return
        length = fragment_bytes(stripe.nbytes, layout.redundancy)
        ranges: dict[int, tuple[int, int, memoryview]] = {}
        for number in range(first // length, -(-last // length)):
            begin, end = max(first, number * length), min(last, (number + 1) * length)
            ranges[number] = (begin - number * length, end - number * length, out[begin - first : end - first])
        got, failed = self._read_fragments(layout, stripe, {i: (b, e) for i, (b, e, _) in ranges.items()}, length, True)
        for number, data in got.items():
            np.copyto(np.frombuffer(ranges[number][2], np.uint8), data)
        if failed:
            read_ranges = {number: (ranges[number][0], data) for number, data in got.items()}
            self._rebuild_ranges(layout, stripe, length, {i: ranges[i] for i in failed}, read_ranges, failed)
        for data in got.values():
            self._member_io.scratch.give_back(data)

    def _read_fragments(
        self, layout: FileLayout, stripe: Stripe, ranges: Mapping[int, tuple[int, int]], length: int, hedge: bool
    ) -> tuple[dict[int, np.ndarray], dict[int, StoreError]]:
        """Read ranges of several fragments at once; return the data and the errors by fragment number.

        Each range has memory of its own, because a timed-out read may still write into it later. hedge: give up slow reads
        early, because other fragments can replace them.
        """
        by_member = {self._member_of(layout, stripe, i) or f"fragment {i}": i for i in ranges}

        def read(number: int) -> np.ndarray:
            begin, end = ranges[number]
            data = self._member_io.scratch.take(end - begin)
            self._read_fragment(layout, stripe, number, begin, end, data.data, length)
            return data

        calls = {member: functools.partial(read, number) for member, number in by_member.items()}
        seconds = self._member_io.hedge_after_seconds if hedge else self._member_io.read_timeout_seconds
        answers, errors = self._member_io.read_fan_out.ask(calls, seconds, skip_failed=hedge, mark_late=not hedge)
        return {by_member[m]: data for m, data in answers.items()}, {by_member[m]: e for m, e in errors.items()}

    def _read_any_copy(self, layout: FileLayout, stripe: Stripe, first: int, last: int, out: memoryview) -> None:
        """Read one of the copies into `out`. Where it fails, read the next one; where it is slow, start the next one beside it.

        The first read writes into `out` itself, and later ones into memory of their own.
        """
        copies = self._order_fragments(layout, stripe)
        if len(copies) < 2:
            errors: dict[int, StoreError] = {}
            for copy in copies:
                try:
                    self._read_fragment(layout, stripe, copy, first, last, out, stripe.nbytes)
                    return
                except StoreError as error:
                    errors[copy] = error
            raise self._unreadable_error(layout, stripe, errors)
        failed: dict[int, StoreError] = {}
        running: dict[Future[None], tuple[int, memoryview]] = {}
        first_view: memoryview | None = None
        until = time.monotonic() + self._member_io.read_timeout_seconds
        while True:
            if copies:
                copy = copies.pop(0)
                view = memoryview(bytearray(last - first)) if running else out[:]
                if not running:
                    first_view = view
                call = functools.partial(self._read_fragment, layout, stripe, copy, first, last, view, stripe.nbytes)
                running[self._member_io.read_fan_out.submit(self._member_of(layout, stripe, copy), call)] = copy, view
            timeout_seconds: float | None = max(0.0, until - time.monotonic())
            if any(view is first_view and self._is_on_this_host(layout, stripe, c) for c, view in running.values()):
                timeout_seconds = None  # a system call that writes into the caller's memory can't be cancelled
            elif copies:
                timeout_seconds = min(timeout_seconds or 0.0, self._member_io.hedge_after_seconds)
            done, _ = wait(running, timeout_seconds, FIRST_COMPLETED)
            for future in done:
                copy, got = running.pop(future)
                try:
                    future.result()
                except StoreError as error:
                    failed[copy] = error
                    continue
                if got is not first_view:
                    assert first_view is not None
                    _revoke_view(first_view, running)
                    out[:] = got
                return
            if not copies and (not running or not done):
                if first_view is not None:
                    _revoke_view(first_view, running)
                raise self._unreadable_error(layout, stripe, failed)

    def _rebuild_ranges(
        self, layout: FileLayout, stripe: Stripe, length: int, ranges: dict[int, tuple[int, int, memoryview]],
        read_ranges: Mapping[int, tuple[int, np.ndarray]], failed: dict[int, StoreError],
    ) -> None:  # fmt: skip
        """Rebuild ranges of fragments that could not be read, from the same range of any k other fragments.

        ranges: begin, end and target by fragment number. read_ranges: what was already read of other fragments, as begin and
        data. failed: the errors so far.
        """
        k = layout.redundancy.data_fragments
        begin = min(b for b, _, _ in ranges.values()) // CELL_BYTES * CELL_BYTES
        end = min(length, -(-max(e for _, e, _ in ranges.values()) // CELL_BYTES) * CELL_BYTES)
        usable = {i: data[begin - b : end - b] for i, (b, data) in read_ranges.items() if b <= begin and b + len(data) >= end}
        scratch: list[np.ndarray] = []
        untried = [i for i in self._order_fragments(layout, stripe) if i not in failed and i not in usable]
        last = False
        while len(usable) < k:
            timed_out = [i for i in failed if isinstance(failed[i], Unavailable) and stripe.fragments[i] is not None]
            if not untried and not last:
                untried, last = timed_out, True  # no other fragments are left: wait for the slow ones
            batch, untried = untried[: k - len(usable)], untried[k - len(usable) :]
            if not batch:
                raise self._unreadable_error(layout, stripe, failed)
            hedge = not last and bool(untried or timed_out)
            got, errors = self._read_fragments(layout, stripe, dict.fromkeys(batch, (begin, end)), length, hedge)
            usable.update(got)
            scratch += got.values()
            failed = {i: error for i, error in failed.items() if i not in got} | errors
        rebuilt: dict[int, np.ndarray] = {}
        for number, (b, e, target) in ranges.items():
            if (b, e) == (begin, end):
                rebuilt[number] = np.frombuffer(target, np.uint8)
            else:
                rebuilt[number] = self._member_io.scratch.take(end - begin)
                scratch.append(rebuilt[number])
        erasure.erasure_code(k, layout.redundancy.parity_fragments).reconstruct(usable, rebuilt)
        for number, (b, e, target) in ranges.items():
            if (b, e) != (begin, end):
                np.copyto(np.frombuffer(target, np.uint8), rebuilt[number][b - begin : e - begin])
        for data in scratch:
            self._member_io.scratch.give_back(data)

    # --- one fragment ------------------------------------------------------------------------------------------

    def _read_fragment(
        self, layout: FileLayout, stripe: Stripe, number: int, first: int, last: int, out: memoryview, length: int
    ) -> None:
        """Read the range from `first` to `last` of one fragment into `out`, and verify it.

        length: of the fragment. Whole cells are read, as each has one checksum. Raises Unavailable also for damaged data, so
        that the caller reads another fragment.
        """
        fragment = stripe.fragments[number]
        if fragment is None:
            raise Unavailable("the fragment is lost")
        begin = first // CELL_BYTES * CELL_BYTES
        end = min(length, -(-last // CELL_BYTES) * CELL_BYTES)
        is_direct = begin == first and end == last
        data = out if is_direct else memoryview(bytearray(end - begin))
        got = self._open_object(layout, fragment).read_into(fragment.position + begin, data)
        sums = fragment.cell_checksums[begin // CELL_BYTES * 8 : -(-end // CELL_BYTES) * 8]
        if got < len(data) or find_bad_cells(data, sums):
            member_object = layout.objects[fragment.object_index]
            state = "damaged" if got == len(data) else "cut"
            problem = f"{member_object.name} on {member_object.member} is {state} at {fragment.position + begin}"
            log.warning("%s of %s: %s; reading another fragment", self._path, self._member_io.url, problem)
            raise Unavailable(problem)
        if not is_direct:
            out[:] = data[first - begin : last - begin]

    def _open_object(self, layout: FileLayout, fragment: Fragment) -> Reader:
        reader = self._readers.get(fragment.object_index)
        if reader is None:
            member_object = layout.objects[fragment.object_index]
            open_member = self._member_io.open_members.get(member_object.member)
            if open_member is None:
                raise Unavailable(f"{member_object.member} is not a member of {self._member_io.url} any more")
            reader = open_member.store.open(member_object.name)
            with self._lock:
                first_opened = self._readers.setdefault(fragment.object_index, reader)
            if first_opened is not reader:
                reader.close()
            return first_opened
        return reader

    def _is_on_this_host(self, layout: FileLayout, stripe: Stripe, number: int) -> bool:
        """Return whether a fragment is in a directory of this host."""
        open_member = self._member_io.open_members.get(self._member_of(layout, stripe, number))
        return open_member is not None and open_member.member.folder is not None

    def _member_of(self, layout: FileLayout, stripe: Stripe, number: int) -> str:
        fragment = stripe.fragments[number]
        return "" if fragment is None else layout.objects[fragment.object_index].member

    def _order_fragments(self, layout: FileLayout, stripe: Stripe) -> list[int]:
        """Return the numbers of the fragments that are not missing, in the order in which to read them.

        Members near this host come first, and members that are down last. Copies rotate from stripe to stripe, so that reads
        are spread over the members.
        """
        present = [i for i, f in enumerate(stripe.fragments) if f is not None]
        rotation = stripe.start >> 23
        if layout.redundancy.data_fragments > 1:
            rotation = 0  # data fragments before parity
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


def _revoke_view(view: memoryview, running: Mapping[Future[None], tuple[int, memoryview]]) -> None:
    """Make sure that a slow thread does not write into the caller's memory any more.

    Data from a node is written through this view in several parts, and each part fails after its release. A thread that reads a
    file directly exports the view's buffer during the system call; wait for its end.
    """
    try:
        view.release()  # the next write of the thread fails
    except BufferError:  # a system call is writing into the view
        for future, (_, own_view) in running.items():
            if own_view is view:
                wait([future])
