"""Writing a file of the namespace: pieces to the members that placement proposes, passing over those that fail."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpt.aggregator import erasure, files
from ckpt.aggregator.fanout import durable
from ckpt.aggregator.files import INLINE_BYTES, File, Fragment, Head, Holder, Layout, Piece, share_bytes
from ckpt.aggregator.placement import Spot, choose
from ckpt.aggregator.redundancy import Redundancy
from ckpt.storage.base import ALIGNMENT, Writer
from ckpt.storage.errors import AlreadyExists, Changed, NoSpace, StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.sums import cells

if TYPE_CHECKING:
    from ckpt.aggregator.namespace import Namespace

log = logging.getLogger("ckpt")

_ABORT_SECONDS = 1.0


def new_version() -> str:
    """Of a content; begins with the time, so that what nobody refers to can be told from what is being written."""
    return f"{int(time.time()):010x}{secrets.token_hex(11)}"


def object_name(version: str) -> str:
    """Of the object that holds a member's fragments of a file; spread over folders."""
    return f"{version[-2:]}/{version}-{secrets.token_hex(2)}"


class Forgotten(StoreError):
    """Members were taken out of the namespace while a file was written to them."""

    def __init__(self, members: Collection[str], file: File, base: File | None, unsettled: int | None) -> None:
        super().__init__(f"{', '.join(sorted(members))} were taken out of the namespace meanwhile; write it anew")
        self.members = members
        self.file = file
        self.base = base
        """What was to be published, and on what, as that is now."""
        self.unsettled = unsettled
        """The fence number by which a member may have taken it."""


class Collected(StoreError):
    """Objects of a file were deleted before it was published, for its writer stood still."""


class FileWriter(Writer):
    """One file on its way. `append` may be called from several threads; the file exists after `commit`."""

    def __init__(
        self, namespace: Namespace, path: str, redundancy: Redundancy, size_hint: int = 0, *, new: bool = False,
        aligned: bool = True, base: File | None = None, replaces: str | None = None,
    ) -> None:  # fmt: skip
        self._namespace = namespace
        self._path = path
        self._redundancy = redundancy
        self._new = new
        self._base = base
        self._replaces = replaces
        self._unit = ALIGNMENT if aligned else 1
        self._size_hint = size_hint
        self._version = new_version()
        self._number = namespace.ring.number
        self._before: list[Layout] = []  # the same objects under the names that they had before an era began
        self._lock = threading.Lock()
        self._pieces: list[Piece | None] = []
        self._end = 0
        self._length = 0
        self._small: bytes | None = b""  # all there is, as long as it is small
        self._holders: list[Holder] = []
        self._writers: list[Writer | None] = []
        self._open: dict[str, int] = {}
        self._opening: dict[str, threading.Lock] = {}
        self._avoided: dict[str, StoreError] = {}
        self._done = False
        if base is not None and base.data is not None:  # what is appended to
            self._small = base.data
            self._end = self._length = len(base.data)
        if base is not None and base.layout is not None:
            self._redundancy = base.layout.redundancy
            self._holders = list(base.layout.holders)
            self._writers = [None] * len(self._holders)
            self._pieces = list(base.layout.pieces)
            self._end = self._length = base.head.nbytes
            self._small = None

    # --- appending ---------------------------------------------------------------------------------------------

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        with self._lock:
            if self._done:
                raise StoreError(f"{self._path} is finished already; create it anew to write it again")
            start = self._end
            self._end = -(-(start + len(data)) // self._unit) * self._unit
            self._length = start + len(data)
            if self._small is not None and self._length <= INLINE_BYTES:
                self._small += bytes(start - len(self._small)) + bytes(data)
                return start
            small, self._small = self._small, None
            first = len(self._pieces)
            self._pieces += [None] * (2 if small else 1)
        if small:
            self._place(first, 0, memoryview(small))
            first += 1
        if len(data):
            self._place(first, start, data)
        return start

    def write_at(self, start: int, data: memoryview) -> None:
        """Write a place of the file where nothing was written yet. What is left out is zeros."""
        with self._lock:
            if self._done:
                raise StoreError(f"{self._path} is finished already; create it anew to write it again")
            small, self._small = self._small, None
            self._end = self._length = max(self._length, start + len(data))
            index = len(self._pieces)
            self._pieces += [None] * (2 if small else 1)
        if small:
            self._place(index, 0, memoryview(small))
            index += 1
        self._place(index, start, data.cast("B"))

    def cut(self, length: int) -> None:
        """Let the file end here; what was written behind that is not read."""
        with self._lock:
            self._length = length

    def _place(self, index: int, start: int, data: memoryview) -> None:
        shares, scratch = self._shares(data)
        sums = [cells(share) for share in shares[: max(1, self._redundancy.data)]]
        if self._redundancy.data == 1:
            sums *= len(shares)
        else:
            sums += [cells(share) for share in shares[self._redundancy.data :]]
        fragments: list[Fragment | None] = [None] * len(shares)
        left = dict(enumerate(self._members(index, len(shares), ())))
        while left:
            failpoint("namespace.append")
            calls = {m: self._sender(m, shares[i]) for i, m in left.items()}
            answers, errors = self._namespace.fan_out.ask(calls, self._namespace.slow_seconds)
            for i, member in list(left.items()):
                if member in answers:
                    holder, position = answers[member]
                    fragments[i] = Fragment(holder, position, sums[i])
                    del left[i]
                else:
                    self._avoid(member, errors[member])
            if left:
                used = [self._holders[f.holder].member for f in fragments if f is not None]
                left = dict(zip(left, self._members(index, len(left), used), strict=False))
        if scratch is not None and not self._avoided:  # else a thread may still be reading it
            self._namespace.give_scratch(scratch)
        self._pieces[index] = Piece(start, len(data), tuple(fragments), len(data))

    def _shares(self, data: memoryview) -> tuple[list[memoryview], np.ndarray | None]:
        """The fragments of a piece, and memory that can be used again."""
        k, m = self._redundancy.data, self._redundancy.parity
        if k == 1:
            return [data] * (1 + m), None
        length = share_bytes(len(data), self._redundancy)
        whole = len(data) // length
        needed = (k - whole + m) * length
        scratch = self._namespace.take_scratch(needed)
        extra = scratch[: (k - whole) * length]
        source = np.frombuffer(data, np.uint8)
        rest = source[whole * length :]
        extra[: len(rest)] = rest
        extra[len(rest) :] = 0
        shares = [source[i * length : (i + 1) * length] for i in range(whole)]
        shares += [extra[i * length : (i + 1) * length] for i in range(k - whole)]
        at = len(extra)
        parity = [scratch[at + i * length : at + (i + 1) * length] for i in range(m)]
        erasure.code(k, m).encode(shares, parity)
        return [s.data for s in (*shares, *parity)], scratch

    def _members(self, index: int, count: int, taken: Sequence[str]) -> list[str]:
        """Where to put so many fragments of a piece, or at least as many as a write settles for. Raises Unavailable, or
        NoSpace, where there are not as many members."""
        near, key, least = self._namespace.near, f"{self._version}/{index}", self._redundancy.least - len(taken)
        found = choose(key, self._well(), count, near, taken)
        if len(found) < least:
            found = choose(key, self._takers(), count, near, taken)
        if len(found) < least:
            raise self._too_few()
        return found

    def _takers(self) -> list[Spot]:
        """The members that may take something."""
        return [s for s in self._namespace.spots if s.weight > 0 and s.name not in self._avoided]

    def _well(self) -> list[Spot]:
        """Those of them that answer."""
        return [s for s in self._takers() if not self._namespace.fan_out.health.down(s.name)]

    def _too_few(self) -> StoreError:
        full = any(isinstance(e, NoSpace) for e in self._avoided.values())
        reasons = "".join(f"; {name}: {error}" for name, error in self._avoided.items())
        return (NoSpace if full else Unavailable)(
            f"{self._path} needs {self._redundancy.least} members for {self._redundancy}, {len(self._takers())} of "
            f"{len(self._namespace.spots)} take anything{reasons}; start or add members, or write with less redundancy"
        )

    def _avoid(self, member: str, error: StoreError) -> None:
        if member not in self._avoided:
            self._avoided[member] = error
            log.warning("%s of %s is written without %s: %s", self._path, self._namespace.url, member, error)

    def _sender(self, member: str, share: memoryview) -> Callable[[], tuple[int, int]]:
        def send() -> tuple[int, int]:
            holder = self._holder(member)
            writer = self._writers[holder]
            assert writer is not None
            return holder, writer.append(share)

        return send

    def _holder(self, member: str) -> int:
        """The object of a member, begun when first needed."""
        with self._lock:
            opening = self._opening.setdefault(member, threading.Lock())
        with opening:
            if member in self._open:
                return self._open[member]
            name = object_name(self._version)
            writer = self._namespace.places[member].store.create(name, self._hint())
            with self._lock:
                if not self._done:
                    self._holders.append(Holder(member, name))
                    self._writers.append(writer)
                    self._open[member] = len(self._holders) - 1
                    return self._open[member]
        writer.abort()
        raise StoreError(f"{self._path} was given up meanwhile")

    def _hint(self) -> int:
        """The share of one member in all that is expected."""
        pieces = max(1, -(-self._size_hint // (8 << 20)))
        members = min(len(self._namespace.spots), pieces * self._redundancy.fragments)
        return int(self._size_hint * self._redundancy.overhead / members) // ALIGNMENT * ALIGNMENT

    # --- the end -----------------------------------------------------------------------------------------------

    def commit(self) -> int:
        self.publish()
        return self._length

    def publish(self) -> File:
        """Make the file durable and visible; what it is now."""
        if self._done:
            raise StoreError(f"{self._path} is finished already")
        now = time.time()
        head = Head("file", self._length, now, now, self._version)
        if self._small is not None:
            file = File(head, data=self._small)
        else:
            pieces = tuple(p for p in self._pieces if p is not None)
            if len(pieces) < len(self._pieces):
                raise StoreError(f"{self._path}: an append failed, so that the file can't be committed; write it anew")
            layout = Layout(self._redundancy, tuple(self._holders), _within(pieces, self._length))
            failpoint("namespace.commit")
            lost = Gone(frozenset(self._commit_objects()))
            file = File(head, layout=self._completed(layout, lost))
        failpoint("namespace.record")
        self._done = True  # whatever happens now, members may have the record: its objects stay, until a scrub knows better
        try:
            file = self._publish(file)
        except (AlreadyExists, Changed):
            self._done = False  # for certain
            raise
        failpoint("namespace.recorded")
        return file

    def _publish(self, file: File) -> File:
        """Publish, elsewhere where a member was taken out meanwhile."""
        unsettled = None
        for _ in range(3):
            number = None if file.layout is None else self._number
            try:
                there = self._namespace.publish(
                    self._path, file, self._new, self._base, number, self._renewed, self._replaces, unsettled
                )
            except Forgotten as error:
                last = error
                file, self._base, unsettled = error.file, error.base, error.unsettled
                assert file.layout is not None
                gone = Gone(frozenset(h.name for h in file.layout.holders if h.member in error.members))
                file = replace(file, layout=self._completed(file.layout, gone))
            else:
                for layout in self._before:
                    self._namespace.discard_layout(self._mine(layout), _names(there.layout))
                return there
        raise last

    def _renewed(self, file: File) -> File:
        """The file after an era began: with second names for its objects, and without those that are gone by now."""
        from ckpt.aggregator.eras import relinked

        if file.layout is None:
            return file
        number = self._namespace.ring.number
        layout, gone = relinked(self._namespace, file.layout, _names(self._mine(file.layout)))
        self._before.append(file.layout)
        left = Gone(gone).applied(layout)
        if files.fewest(left) < self._redundancy.data and files.fewest(file.layout) >= self._redundancy.data:
            raise Collected(
                f"{self._path}: a repair has deleted what was written of it, because no record named it and its writer stood "
                "still; it was not published now, write it anew"
            )
        self._number = number
        return replace(file, layout=self._completed(layout, Gone(gone)) if gone else layout)

    def _mine(self, layout: Layout) -> Layout:
        """A layout with the objects alone that were made for this file: not those of what it is written on."""
        before = _names(self._base.layout if self._base is not None else None)
        return replace(layout, holders=tuple(h for h in layout.holders if h.name not in before), pieces=())

    def _completed(self, layout: Layout, gone: Gone) -> Layout:
        """The layout without what is gone, and with what is missing on other members, as far as there are any: else a repair
        does that once there are. Raises Unavailable, or NoSpace, where that is less than a write settles for."""
        left, asked = gone.applied(layout), self._redundancy
        before = len(self._base.layout.pieces) if self._base is not None and self._base.layout is not None else 0
        touched = [i for i, piece in enumerate(left.pieces) if i >= before or piece != layout.pieces[i]]

        def there() -> int:
            return files.fewest(left, [left.pieces[i] for i in touched])

        if there() < asked.least or there() < asked.fragments <= len(self._well()):
            with suppress(Unavailable):
                left = gone.applied(self._namespace.restore(self._path, self._version, layout, gone, partly=True))
        if there() < asked.least:
            raise self._too_few()
        if there() < asked.fragments:
            self._namespace.tell_short(self._path, there(), asked)
        return files.compact(left)

    def _commit_objects(self) -> set[str]:
        """Make the objects durable that hold something; the names of those that could not be made so."""
        used = {f.holder for piece in self._pieces if piece is not None for f in piece.fragments if f is not None}
        mine = {i: writer for i, writer in enumerate(self._writers) if writer is not None}
        commits = {self._holders[i].member: durable(writer) for i, writer in mine.items() if i in used}
        _, errors = self._namespace.fan_out.ask(commits, self._namespace.commit_seconds)
        for member, error in errors.items():
            self._avoid(member, error)
        empty = {self._holders[i].member: writer.abort for i, writer in mine.items() if i not in used}
        # Where nobody answers it expires, or a scrub finds it; what is open here goes in any case.
        self._namespace.fan_out.ask(empty, _ABORT_SECONDS, blame=False)
        return {self._holders[i].name for i in mine if self._holders[i].member in errors}

    def abort(self) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
            writers = [w for w in self._writers if w is not None]
        for writer in writers:
            with suppress(StoreError):
                writer.abort()
        names: dict[str, list[str]] = {}
        for holder, began in zip(self._holders, self._writers, strict=True):
            if began is not None:
                names.setdefault(holder.member, []).append(holder.name)
        self._namespace.discard(names)


def _names(layout: Layout | None) -> set[str]:
    """Of the objects of a layout."""
    return set() if layout is None else {h.name for h in layout.holders}


def _within(pieces: Sequence[Piece], length: int) -> tuple[Piece, ...]:
    """The pieces of a file that was cut, so that what is appended later lies behind them."""
    return tuple(replace(p, reach=length - p.start) if p.start + p.reach > length else p for p in pieces if p.start < length)


@dataclass(frozen=True, slots=True)
class Gone:
    """Fragments of a file that can't be read any more."""

    objects: frozenset[str] = frozenset()
    """Whole objects, by name."""
    fragments: frozenset[tuple[str, int]] = frozenset()
    """Single ones: object and position."""
    incomplete: bool = False
    """The layout says itself that some are missing."""

    def __bool__(self) -> bool:
        return bool(self.objects or self.fragments or self.incomplete)

    def applied(self, layout: Layout) -> Layout:
        """The layout with these fragments missing."""

        def left(fragment: Fragment | None) -> Fragment | None:
            if fragment is None:
                return None
            name = layout.holders[fragment.holder].name
            return None if name in self.objects or (name, fragment.position) in self.fragments else fragment

        pieces = (replace(p, fragments=tuple(left(f) for f in p.fragments)) for p in layout.pieces)
        return replace(layout, pieces=tuple(pieces))
