"""Making lost fragments anew from those that are left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckpt.aggregator import erasure
from ckpt.aggregator.fanout import durable, in_order
from ckpt.aggregator.files import Fragment, Holder, Layout, Piece, compact, share_bytes
from ckpt.aggregator.placement import choose
from ckpt.aggregator.writing import Gone, new_version, object_name
from ckpt.storage.base import ALIGNMENT, Reader, Writer
from ckpt.storage.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.sums import bad_cells, cells

if TYPE_CHECKING:
    from ckpt.aggregator.namespace import Namespace

log = logging.getLogger("ckpt")

Progress = Callable[[int], None]

_TRIES = 4
_THREADS = 4  # pieces at once: one waits for a disk while another is on the wire


def restore(
    namespace: Namespace, path: str, version: str, layout: Layout, gone: Gone, progress: Progress = lambda _: None,
    leave: Collection[str] = (), partly: bool = False,
) -> Layout:  # fmt: skip
    """The layout without what is gone, and with those fragments in new objects on other members, not on those to leave.

    Each fragment is checked against its sums, the new ones too. Raises Unavailable where too little is left, or where there are
    too few members; partly: what no member takes stays where it was, be it gone for ever, or till somebody is back.
    """
    avoid = set(leave)
    before = layout
    for _ in range(_TRIES):
        avoid |= {h.member for h in layout.holders if h.name in gone.objects}
        left = gone.applied(layout)
        layout, failed = _restore_once(namespace, path, version, left, before, avoid, leave, partly, progress)
        if not failed:
            return compact(_kept(layout, before) if partly else layout)
        gone = Gone(frozenset(failed))  # members that failed meanwhile: once more, without them
        if partly:
            leave = {*leave, *(h.member for h in layout.holders if h.name in failed)}
    raise Unavailable(f"{path} could not be restored: members failed {_TRIES} times meanwhile; try again")


def _kept(layout: Layout, before: Layout) -> Layout:
    """A layout that was made of `before`, whose holders it has, with that one's fragments where its own are missing."""

    def kept(piece: Piece, old: Piece) -> Piece:
        taken = {layout.holders[f.holder].member for f in piece.fragments if f is not None}
        both = zip(piece.fragments, old.fragments, strict=True)
        return replace(piece, fragments=tuple(now or _elsewhere(layout, was, taken) for now, was in both))

    return replace(layout, pieces=tuple(map(kept, layout.pieces, before.pieces)))


def _elsewhere(layout: Layout, fragment: Fragment | None, taken: Collection[str]) -> Fragment | None:
    """A fragment, unless it is on one of these members: two of a piece would be lost together."""
    return None if fragment is None or layout.holders[fragment.holder].member in taken else fragment


def _restore_once(
    namespace: Namespace, path: str, version: str, layout: Layout, before: Layout, avoid: set[str], leave: Collection[str],
    partly: bool, progress: Progress,
) -> tuple[Layout, set[str]]:  # fmt: skip
    """The layout with what it misses in new objects, and the names of those that could not be made durable."""
    lost = sum(share_bytes(p.nbytes, layout.redundancy) * p.fragments.count(None) for p in layout.pieces)
    objects = _Objects(namespace, path, layout, lost // len(namespace.spots) // ALIGNMENT * ALIGNMENT)
    sources = _Sources(namespace)
    pieces = list(layout.pieces)

    def mend(index: int) -> None:
        piece = layout.pieces[index]
        missing = [i for i, f in enumerate(piece.fragments) if f is None]
        failpoint("repair.piece")
        used = [layout.holders[f.holder].member for f in piece.fragments if f is not None]
        targets = _targets(namespace, f"{version}/{index}", len(missing), used, avoid, leave, partly)
        new = _dealt(namespace, before, index, missing, [t for t in targets if objects.takes(t)])
        missing = list(new)
        if not missing:
            return
        count = layout.redundancy.data + len(missing)
        pages = max(1, -(-share_bytes(piece.nbytes, layout.redundancy) // ALIGNMENT))
        scratch = namespace.take_scratch(count * pages * ALIGNMENT)
        memory = list(scratch.reshape(count, -1))
        shares = _rebuilt(sources, path, layout, piece, missing, before, index, memory)
        fragments = list(piece.fragments)
        for i, member in new.items():
            if (at := objects.append(member, shares[i])) is not None:
                fragments[i] = Fragment(*at, _sums_of(layout, piece, i, shares[i]))
                progress(len(shares[i]))
        pieces[index] = replace(piece, fragments=tuple(fragments))
        namespace.give_scratch(scratch)

    broken = [index for index, piece in enumerate(layout.pieces) if None in piece.fragments]
    try:
        in_order(mend, broken, _THREADS, "ckpt-restore")
        failpoint("repair.commit")
        objects.commit()
    except BaseException:
        objects.abort()
        raise
    finally:
        sources.close()
    return Layout(layout.redundancy, tuple(objects.holders), tuple(pieces)), objects.failed


class _Objects:
    """New objects on the members that take what is restored, one on each, of about `size_hint` bytes. Safe to use from many
    threads."""

    def __init__(self, namespace: Namespace, path: str, layout: Layout, size_hint: int) -> None:
        self._namespace = namespace
        self._size_hint = size_hint
        self._path = path
        self._lock = threading.Lock()
        self._writers: dict[str, tuple[int, Writer]] = {}
        self._opening: dict[str, threading.Lock] = {}
        self.holders = list(layout.holders)
        self.failed: set[str] = set()
        """Names of those that did not take everything."""

    def takes(self, member: str) -> bool:
        """Whether a member can be written to. One that can't is told, and asked but once."""
        return self.holders[self._begun(member)[0]].name not in self.failed

    def append(self, member: str, share: np.ndarray) -> tuple[int, int] | None:
        """The number of the holder, and the position there; None where it could not be written."""
        holder, writer = self._begun(member)
        try:
            return holder, writer.append(share.data)
        except StoreError as error:
            self._fail(member, holder, error)
            return None

    def _begun(self, member: str) -> tuple[int, Writer]:
        with self._lock:
            opening = self._opening.setdefault(member, threading.Lock())
        with opening:  # others go on with theirs
            if member not in self._writers:
                name = object_name(new_version())
                with self._lock:
                    self.holders.append(Holder(member, name))
                    holder = len(self.holders) - 1
                writer: Writer = _Failed()
                try:
                    writer = self._namespace.places[member].store.create(name, self._size_hint)
                except StoreError as error:
                    self._fail(member, holder, error)
                self._writers[member] = holder, writer
            return self._writers[member]

    def _fail(self, member: str, holder: int, error: StoreError) -> None:
        log.warning("%s: %s takes no more: %s", self._path, member, error)
        self._namespace.fan_out.health.failed(member, error)
        self.failed.add(self.holders[holder].name)

    def commit(self) -> None:
        """Make durable what can be made so."""
        calls = {member: durable(writer) for member, (_, writer) in self._writers.items()}
        _, errors = self._namespace.fan_out.ask(calls, self._namespace.commit_seconds)
        for member, error in errors.items():
            self._fail(member, self._writers[member][0], error)

    def abort(self) -> None:
        for _, writer in self._writers.values():
            with suppress(StoreError):
                writer.abort()


class _Failed(Writer):
    """In place of an object that could not be begun."""

    def append(self, data: memoryview) -> int:
        raise Unavailable("it was not begun")

    def commit(self) -> int:
        raise Unavailable("it was not begun")

    def abort(self) -> None:
        """There is nothing."""


def _targets(
    namespace: Namespace, key: str, count: int, used: list[str], avoid: set[str], leave: Collection[str], partly: bool
) -> list[str]:
    """Members for new fragments: such as hold nothing of the piece, answer, and did not just lose something, if possible; in no
    case those to leave. partly: for some of them, if there are no more."""
    every = [s for s in namespace.spots if s.name not in leave]
    well = [s for s in every if not namespace.fan_out.health.down(s.name)]
    found: list[str] = []
    for spots in ([s for s in well if s.name not in avoid], [s for s in every if s.name not in avoid], well, every):
        found = choose(key, spots, count, (), used)
        if len(found) == count:
            return found
        if partly and spots is well:  # who does not answer is no help
            return found
    raise Unavailable(f"{count} more members are needed for what was lost or is to move, and there are none; add members")


def _dealt(namespace: Namespace, before: Layout, index: int, missing: list[int], targets: list[str]) -> dict[int, str]:
    """Which of the missing fragments of a piece each target takes: the one that it had, as no member may have two, then those
    that are gone rather than those of members which do not answer now and may be back."""
    fragments = before.pieces[index].fragments
    had = {i: before.holders[f.holder].member for i in missing if (f := fragments[i]) is not None}
    own = {member: i for i, member in had.items()}
    new = {own[t]: t for t in targets if t in own}
    rest = sorted((i for i in missing if i not in new), key=lambda i: i in had and namespace.fan_out.health.down(had[i]))
    return new | dict(zip(rest, (t for t in targets if t not in own), strict=False))


class _Sources:
    """The objects that are read from, each opened once. Safe to use from many threads."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._readers: dict[Holder, Reader] = {}

    def read(self, holder: Holder, fragment: Fragment, data: np.ndarray) -> None:
        """Fill `data` with a fragment, verified. Raises StoreError, IntegrityError."""
        place = self._namespace.places.get(holder.member)
        if place is None:
            raise Unavailable("no member any more")
        with self._lock:
            reader = self._readers.get(holder)
            if reader is None:
                reader = self._readers[holder] = place.store.open(holder.name)
        if reader.read_into(fragment.position, data.data) < len(data):
            raise IntegrityError(f"{holder.name} is cut")
        if bad_cells(data.data, fragment.cells):
            raise IntegrityError(f"{holder.name} is damaged")

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def _rebuilt(
    sources: _Sources, path: str, layout: Layout, piece: Piece, missing: list[int], before: Layout, index: int,
    memory: list[np.ndarray],
) -> dict[int, np.ndarray]:  # fmt: skip
    """The missing fragments: from where they were, if they are only to move, else from the others.

    memory: for those that are missing and for as many as a piece needs.
    """
    redundancy = layout.redundancy
    length = share_bytes(piece.nbytes, redundancy)
    moved: dict[int, np.ndarray] = {}
    for i in missing:
        was = before.pieces[index].fragments[i]
        if was is not None:
            with suppress(StoreError, IntegrityError):
                sources.read(before.holders[was.holder], was, memory[-1][:length])
                moved[i] = memory.pop()[:length]
    missing = [i for i in missing if i not in moved]
    if not missing:
        return moved
    good = dict(list(moved.items())[: redundancy.data])
    reasons = []
    for i, fragment in enumerate(piece.fragments):
        if fragment is None or i in good or len(good) == redundancy.data:
            continue
        holder = layout.holders[fragment.holder]
        try:
            sources.read(holder, fragment, memory[-1][:length])
            good[i] = memory.pop()[:length]
        except (StoreError, IntegrityError) as error:
            reasons.append(f"{holder.member}: {error}")
    if len(good) < redundancy.data:
        raise Unavailable(
            f"bytes {piece.start} to {piece.start + piece.nbytes} of {path} are lost: {len(good)} fragments are left of "
            f"{redundancy}, {redundancy.data} are needed ({'; '.join(reasons) or 'the others are gone'}); "
            "start the missing members"
        )
    if redundancy.data == 1:
        only = next(iter(good.values()))
        return moved | dict.fromkeys(missing, only)
    into = {i: memory.pop()[:length] for i in missing}
    erasure.code(redundancy.data, redundancy.parity).rebuild(good, into)
    return moved | into


def _sums_of(layout: Layout, piece: Piece, number: int, share: np.ndarray) -> bytes:
    """Of a new fragment: as before the loss for a copy, computed where the share had its own."""
    found = cells(share.data)
    if layout.redundancy.data == 1:
        known = next((f.cells for f in piece.fragments if f is not None), found)
        if known != found:
            raise IntegrityError("a copy changed while it was copied")
    return found
