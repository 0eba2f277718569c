"""Making lost fragments anew from those that are left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ckpt.aggregator.cluster.fanout import commit_or_abort, run_in_order
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.object_names import new_version, object_name
from ckpt.aggregator.placement import erasure
from ckpt.aggregator.placement.rendezvous_hash import choose_members
from ckpt.aggregator.records.file_record import FileLayout, Fragment, MemberObject, Stripe, drop_unused_objects, fragment_bytes
from ckpt.storage.base.checksums import cell_checksums, find_bad_cells
from ckpt.storage.base.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import ALIGNMENT, Reader, Writer

log = logging.getLogger("ckpt")

ByteProgress = Callable[[int], None]
"""Called with the bytes just done, from many threads."""

_MAX_TRIES = 4
_THREADS = 4  # pieces at once: one waits for a disk while another is on the wire


def rebuild_fragments(
    member_io: MemberIO,
    path: str,
    version: str,
    layout: FileLayout,
    lost: LostFragments,
    progress: ByteProgress = lambda _: None,
    excluded: Collection[str] = (),
    allow_partial: bool = False,
) -> FileLayout:
    """The layout without what is gone, and with those fragments in new objects on other members, not on those to leave.

    Each fragment is checked against its sums, the new ones too. Raises Unavailable where too little is left, or where there are
    too few members; allow_partial: what no member takes stays where it was, be it gone for ever, or till somebody is back.
    """
    avoided = set(excluded)
    before = layout
    for _ in range(_MAX_TRIES):
        avoided |= {h.member for h in layout.objects if h.name in lost.objects}
        remaining = lost.removed_from(layout)
        targets = _Targets(member_io, frozenset(avoided), frozenset(excluded), allow_partial)
        layout, failed = _rebuild_once(targets, path, version, remaining, before, progress)
        if not failed:
            return drop_unused_objects(_with_previous_fragments(layout, before) if allow_partial else layout)
        lost = LostFragments(frozenset(failed))  # members that failed meanwhile: once more, without them
        if allow_partial:
            excluded = {*excluded, *(h.member for h in layout.objects if h.name in failed)}
    raise Unavailable(f"{path} could not be restored: members failed {_MAX_TRIES} times meanwhile; try again")


def _with_previous_fragments(layout: FileLayout, previous: FileLayout) -> FileLayout:
    """A layout that was made of `before`, whose holders it has, with that one's fragments where its own are missing."""

    def kept(piece: Stripe, old: Stripe) -> Stripe:
        taken = {layout.objects[f.object_index].member for f in piece.fragments if f is not None}
        both = zip(piece.fragments, old.fragments, strict=True)
        return replace(piece, fragments=tuple(now or _unless_on_members(layout, was, taken) for now, was in both))

    return replace(layout, stripes=tuple(map(kept, layout.stripes, previous.stripes)))


def _unless_on_members(layout: FileLayout, fragment: Fragment | None, members: Collection[str]) -> Fragment | None:
    """A fragment, unless it is on one of these members: two of a piece would be lost together."""
    return None if fragment is None or layout.objects[fragment.object_index].member in members else fragment


@dataclass(frozen=True, slots=True)
class _Targets:
    """Where new fragments may go."""

    member_io: MemberIO
    avoided: frozenset[str]
    """Members that just lost something: taken only if there are no others."""
    excluded: frozenset[str]
    """Members that are to be left: never taken."""
    allow_partial: bool
    """Whether some of the fragments will do, if there are no more members."""

    def choose(self, key: str, count: int, used: list[str]) -> list[str]:
        """Members for new fragments of a stripe: such as hold nothing of it, answer, and are not avoided, if possible."""
        every = [s for s in self.member_io.locations if s.name not in self.excluded]
        responsive = [s for s in every if not self.member_io.fan_out.health.is_down(s.name)]
        found: list[str] = []
        for spots in (
            [s for s in responsive if s.name not in self.avoided],
            [s for s in every if s.name not in self.avoided],
            responsive,
            every,
        ):
            found = choose_members(key, spots, count, (), used)
            if len(found) == count:
                return found
            if self.allow_partial and spots is responsive:  # who does not answer is no help
                return found
        raise Unavailable(f"{count} more members are needed for what was lost or is to move, and there are none; add members")


def _rebuild_once(
    targets: _Targets, path: str, version: str, layout: FileLayout, previous: FileLayout, progress: ByteProgress
) -> tuple[FileLayout, set[str]]:
    """The layout with what it misses in new objects, and the names of those that could not be made durable."""
    member_io = targets.member_io
    lost = sum(fragment_bytes(p.nbytes, layout.redundancy) * p.fragments.count(None) for p in layout.stripes)
    objects = _NewObjects(member_io, path, layout, lost // len(member_io.locations) // ALIGNMENT * ALIGNMENT)
    sources = _SourceObjects(member_io)
    pieces = list(layout.stripes)

    def mend(index: int) -> None:
        piece = layout.stripes[index]
        missing = [i for i, f in enumerate(piece.fragments) if f is None]
        failpoint("repair.piece")
        used = [layout.objects[f.object_index].member for f in piece.fragments if f is not None]
        members = [m for m in targets.choose(f"{version}/{index}", len(missing), used) if objects.is_writable(m)]
        new = _assign_fragments(member_io, previous, index, missing, members)
        missing = list(new)
        if not missing:
            return
        count = layout.redundancy.data_fragments + len(missing)
        pages = max(1, -(-fragment_bytes(piece.nbytes, layout.redundancy) // ALIGNMENT))
        scratch = member_io.scratch.take(count * pages * ALIGNMENT)
        memory = list(scratch.reshape(count, -1))
        shares = _make_missing_fragments(sources, path, layout, piece, missing, previous, index, memory)
        fragments = list(piece.fragments)
        for i, member in new.items():
            if (at := objects.append(member, shares[i])) is not None:
                fragments[i] = Fragment(*at, _fragment_checksums(layout, piece, i, shares[i]))
                progress(len(shares[i]))
        pieces[index] = replace(piece, fragments=tuple(fragments))
        member_io.scratch.give_back(scratch)

    broken = [index for index, piece in enumerate(layout.stripes) if None in piece.fragments]
    try:
        run_in_order(mend, broken, _THREADS, "ckpt-restore")
        failpoint("repair.commit")
        objects.commit()
    except BaseException:
        objects.abort()
        raise
    finally:
        sources.close()
    return FileLayout(layout.redundancy, tuple(objects.objects), tuple(pieces)), objects.failed


class _NewObjects:
    """New objects on the members that take what is restored, one on each, of about `size_hint` bytes. Safe to use from many
    threads."""

    def __init__(self, member_io: MemberIO, path: str, layout: FileLayout, size_hint: int) -> None:
        self._member_io = member_io
        self._size_hint = size_hint
        self._path = path
        self._lock = threading.Lock()
        self._writers: dict[str, tuple[int, Writer]] = {}
        self._opening: dict[str, threading.Lock] = {}
        self.objects = list(layout.objects)
        self.failed: set[str] = set()
        """Names of those that did not take everything."""

    def is_writable(self, member: str) -> bool:
        """Whether a member can be written to. A member that can't is reported, and is asked only once."""
        return self.objects[self._writer_of(member)[0]].name not in self.failed

    def append(self, member: str, share: np.ndarray) -> tuple[int, int] | None:
        """The number of the holder, and the position there; None where it could not be written."""
        holder, writer = self._writer_of(member)
        try:
            return holder, writer.append(share.data)
        except StoreError as error:
            self._mark_failed(member, holder, error)
            return None

    def _writer_of(self, member: str) -> tuple[int, Writer]:
        with self._lock:
            opening = self._opening.setdefault(member, threading.Lock())
        with opening:  # others go on with theirs
            if member not in self._writers:
                name = object_name(new_version())
                with self._lock:
                    self.objects.append(MemberObject(member, name))
                    holder = len(self.objects) - 1
                writer: Writer = _FailedWriter()
                try:
                    writer = self._member_io.open_members[member].store.create(name, self._size_hint)
                except StoreError as error:
                    self._mark_failed(member, holder, error)
                self._writers[member] = holder, writer
            return self._writers[member]

    def _mark_failed(self, member: str, holder: int, error: StoreError) -> None:
        log.warning("%s: %s takes no more: %s", self._path, member, error)
        self._member_io.fan_out.health.record_failure(member, error)
        self.failed.add(self.objects[holder].name)

    def commit(self) -> None:
        """Make durable what can be made so."""
        calls = {member: commit_or_abort(writer) for member, (_, writer) in self._writers.items()}
        _, errors = self._member_io.fan_out.ask(calls, self._member_io.commit_timeout_seconds)
        for member, error in errors.items():
            self._mark_failed(member, self._writers[member][0], error)

    def abort(self) -> None:
        for _, writer in self._writers.values():
            with suppress(StoreError):
                writer.abort()


class _FailedWriter(Writer):
    """In place of an object that could not be begun."""

    def append(self, data: memoryview) -> int:
        raise Unavailable("it was not begun")

    def commit(self) -> int:
        raise Unavailable("it was not begun")

    def abort(self) -> None:
        """There is nothing."""


def _assign_fragments(
    member_io: MemberIO, previous: FileLayout, index: int, missing: list[int], targets: list[str]
) -> dict[int, str]:
    """Which of the missing fragments of a piece each target takes: the one that it had, as no member may have two, then those
    that are gone rather than those of members which do not answer now and may be back."""
    fragments = previous.stripes[index].fragments
    had = {i: previous.objects[f.object_index].member for i in missing if (f := fragments[i]) is not None}
    own = {member: i for i, member in had.items()}
    new = {own[t]: t for t in targets if t in own}
    rest = sorted((i for i in missing if i not in new), key=lambda i: i in had and member_io.fan_out.health.is_down(had[i]))
    return new | dict(zip(rest, (t for t in targets if t not in own), strict=False))


class _SourceObjects:
    """The objects that are read from, each opened once. Safe to use from many threads."""

    def __init__(self, member_io: MemberIO) -> None:
        self._member_io = member_io
        self._lock = threading.Lock()
        self._readers: dict[MemberObject, Reader] = {}

    def read(self, holder: MemberObject, fragment: Fragment, data: np.ndarray) -> None:
        """Fill `data` with a fragment, verified. Raises StoreError, IntegrityError."""
        open_member = self._member_io.open_members.get(holder.member)
        if open_member is None:
            raise Unavailable("no member any more")
        with self._lock:
            reader = self._readers.get(holder)
            if reader is None:
                reader = self._readers[holder] = open_member.store.open(holder.name)
        if reader.read_into(fragment.position, data.data) < len(data):
            raise IntegrityError(f"{holder.name} is cut")
        if find_bad_cells(data.data, fragment.cell_checksums):
            raise IntegrityError(f"{holder.name} is damaged")

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def _make_missing_fragments(
    sources: _SourceObjects,
    path: str,
    layout: FileLayout,
    stripe: Stripe,
    missing: list[int],
    previous: FileLayout,
    index: int,
    memory: list[np.ndarray],
) -> dict[int, np.ndarray]:
    """The missing fragments: from where they were, if they are only to move, else from the others.

    memory: for those that are missing and for as many as a piece needs.
    """
    redundancy = layout.redundancy
    length = fragment_bytes(stripe.nbytes, redundancy)
    moved: dict[int, np.ndarray] = {}
    for i in missing:
        was = previous.stripes[index].fragments[i]
        if was is not None:
            with suppress(StoreError, IntegrityError):
                sources.read(previous.objects[was.object_index], was, memory[-1][:length])
                moved[i] = memory.pop()[:length]
    missing = [i for i in missing if i not in moved]
    if not missing:
        return moved
    usable = dict(list(moved.items())[: redundancy.data_fragments])
    reasons = []
    for i, fragment in enumerate(stripe.fragments):
        if fragment is None or i in usable or len(usable) == redundancy.data_fragments:
            continue
        holder = layout.objects[fragment.object_index]
        try:
            sources.read(holder, fragment, memory[-1][:length])
            usable[i] = memory.pop()[:length]
        except (StoreError, IntegrityError) as error:
            reasons.append(f"{holder.member}: {error}")
    if len(usable) < redundancy.data_fragments:
        raise Unavailable(
            f"bytes {stripe.start} to {stripe.start + stripe.nbytes} of {path} are lost: {len(usable)} fragments are left of "
            f"{redundancy}, {redundancy.data_fragments} are needed ({'; '.join(reasons) or 'the others are gone'}); "
            "start the missing members"
        )
    if redundancy.data_fragments == 1:
        only = next(iter(usable.values()))
        return moved | dict.fromkeys(missing, only)
    into = {i: memory.pop()[:length] for i in missing}
    erasure.erasure_code(redundancy.data_fragments, redundancy.parity_fragments).reconstruct(usable, into)
    return moved | into


def _fragment_checksums(layout: FileLayout, stripe: Stripe, number: int, share: np.ndarray) -> bytes:
    """Of a new fragment: as before the loss for a copy, computed where the share had its own."""
    computed = cell_checksums(share.data)
    if layout.redundancy.data_fragments == 1:
        previous = next((f.cell_checksums for f in stripe.fragments if f is not None), computed)
        if previous != computed:
            raise IntegrityError("a copy changed while it was copied")
    return computed
