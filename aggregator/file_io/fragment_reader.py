"""The class FragmentReader, which reads and verifies ranges of the fragments of one file."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.records.file_record import USUAL_STRIPE_BYTES, FileLayout, Fragment, Stripe
from ckpt.storage.base.checksums import CELL_BYTES, find_bad_cells
from ckpt.storage.base.errors import CkptError, IntegrityError, StoreError, Unavailable
from ckpt.storage.base.store import Reader

log = logging.getLogger("ckpt")


class DamagedFragment(Unavailable):
    """The stored bytes of a fragment differ from what was written."""


@dataclass(frozen=True, slots=True)
class FragmentRange:
    """A range of one fragment, and where its bytes go."""

    begin: int
    """The first byte in the fragment."""
    end: int
    """The end in the fragment: one more than the last byte."""
    target: memoryview


class FragmentReader:
    """Reads fragments of the stripes of one file. Several threads may use it at once.

    layout: of the version that was opened.
    """

    def __init__(self, member_io: MemberIO, path: str, layout: FileLayout) -> None:
        self.member_io = member_io
        self.layout = layout
        self._path = path
        self._readers: dict[int, Reader] = {}  # by the index of the member object
        self._lock = threading.Lock()
        """Guards changes of `_readers`."""

    @property
    def file_name(self) -> str:
        """The path and its namespace, for messages."""
        return f"{self._path} in {self.member_io.url}"

    def close(self) -> None:
        """Close the objects that were opened."""
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            with suppress(StoreError):
                reader.close()

    def read_many(
        self, stripe: Stripe, ranges: Mapping[int, tuple[int, int]], length: int, hedge: bool
    ) -> tuple[dict[int, np.ndarray], dict[int, StoreError]]:
        """Read ranges of several fragments at once; return the data and the errors by fragment number.

        ranges: begin and end in the fragment, by its number. length: of each fragment in bytes. hedge: give up slow reads
        early, because other fragments can replace them.

        Each range has memory of its own, because a timed-out read may still write into it later.
        """
        by_member = {self.member_of(stripe, i) or f"fragment {i}": i for i in ranges}

        def read(number: int) -> np.ndarray:
            begin, end = ranges[number]
            data = self.member_io.scratch.take(end - begin)
            self.read(stripe, number, begin, end, data.data, length)
            return data

        calls = {member: functools.partial(read, number) for member, number in by_member.items()}
        seconds = self.member_io.hedge_after_seconds if hedge else self.member_io.read_timeout_seconds
        answers, errors = self.member_io.read_fan_out.ask(calls, seconds, skip_failed=hedge, mark_late=not hedge)
        return {by_member[m]: data for m, data in answers.items()}, {by_member[m]: e for m, e in errors.items()}

    def read(self, stripe: Stripe, number: int, first: int, last: int, out: memoryview, length: int) -> None:
        """Read one fragment from byte `first` to before byte `last` into `out`, and verify it.

        length: of the fragment in bytes. Whole cells are read, as each has one checksum.

        Raises StoreError, such as Unavailable, and its subclass DamagedFragment for damaged data: the caller then reads another
        fragment.
        """
        fragment = stripe.fragments[number]
        if fragment is None:
            raise Unavailable("the fragment is lost")
        begin = first // CELL_BYTES * CELL_BYTES
        end = min(length, -(-last // CELL_BYTES) * CELL_BYTES)
        is_direct = begin == first and end == last
        data = out if is_direct else memoryview(bytearray(end - begin))
        got = self._open_object(fragment).read_into(fragment.position + begin, data)
        sums = fragment.cell_checksums[begin // CELL_BYTES * 8 : -(-end // CELL_BYTES) * 8]
        if got < len(data) or find_bad_cells(data, sums):
            member_object = self.layout.objects[fragment.object_index]
            state = "damaged" if got == len(data) else "cut"
            problem = f"{member_object.name} on {member_object.member} is {state} at {fragment.position + begin}"
            log.warning("%s of %s: %s; reading another fragment", self._path, self.member_io.url, problem)
            raise DamagedFragment(problem)
        if not is_direct:
            out[:] = data[first - begin : last - begin]

    def _open_object(self, fragment: Fragment) -> Reader:
        reader = self._readers.get(fragment.object_index)
        if reader is None:
            member_object = self.layout.objects[fragment.object_index]
            open_member = self.member_io.open_members.get(member_object.member)
            if open_member is None:
                raise Unavailable(f"{member_object.member} is not a member of {self.member_io.url} any more")
            reader = open_member.store.open(member_object.name)
            with self._lock:
                first_opened = self._readers.setdefault(fragment.object_index, reader)
            if first_opened is not reader:
                reader.close()
            return first_opened
        return reader

    def is_on_this_host(self, stripe: Stripe, number: int) -> bool:
        """Return whether a fragment is in a directory of this host."""
        open_member = self.member_io.open_members.get(self.member_of(stripe, number))
        return open_member is not None and open_member.member.folder is not None

    def member_of(self, stripe: Stripe, number: int) -> str:
        """Return the name of the member that stores a fragment; "" if the fragment is missing."""
        fragment = stripe.fragments[number]
        return "" if fragment is None else self.layout.objects[fragment.object_index].member

    def reading_order(self, stripe: Stripe) -> list[int]:
        """Return the numbers of the fragments that are not missing, in the order in which to read them.

        Members near this host come first, and members that are down last. Copies rotate from stripe to stripe, so that reads
        are spread over the members.
        """
        present = [i for i, f in enumerate(stripe.fragments) if f is not None]
        rotation = stripe.start // USUAL_STRIPE_BYTES
        if self.layout.redundancy.data_fragments > 1:
            rotation = 0  # data fragments before parity
        present = present[rotation % len(present) :] + present[: rotation % len(present)] if present else present

        def cost(number: int) -> tuple[bool, int]:
            member = self.member_of(stripe, number)
            return self.member_io.fan_out.health.is_down(member), -self.member_io.shared_domains(member)

        return sorted(present, key=cost)

    def unreadable_error(self, stripe: Stripe, failed: Mapping[int, StoreError]) -> CkptError:
        """Return the error for a stripe of which too few fragments can be read: IntegrityError if all failed ones are damaged.

        failed: the errors by fragment number.
        """
        failed = {i: error for i, error in failed.items() if stripe.fragments[i] is not None}
        reasons = "; ".join(f"{self.member_of(stripe, i)}: {error}" for i, error in sorted(failed.items()))
        present_count = sum(f is not None for f in stripe.fragments)
        message = (
            f"bytes {stripe.start} to {stripe.start + stripe.nbytes} of {self.file_name} can't be read: "
            f"{self.layout.redundancy.data_fragments} of {len(stripe.fragments)} fragments are needed, "
            f"{present_count - len(failed)} answer ({reasons})"
        )
        if failed and all(isinstance(error, DamagedFragment) for error in failed.values()):
            return IntegrityError(f"{message}; run `ckpt-node admin scrub`, and restore the file from a copy")
        return Unavailable(f"{message}; start the missing members, or run `ckpt-node admin status`")
