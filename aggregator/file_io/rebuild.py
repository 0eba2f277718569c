"""The rebuild of lost fragments of a file from those that are left, in new objects on other members."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ckpt.aggregator.cluster.fanout import commit_or_abort, run_in_order
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.object_names import new_version, object_name
from ckpt.aggregator.file_io.source_objects import SourceObjects
from ckpt.aggregator.file_io.verified_reconstruction import VerifiedReconstruction
from ckpt.aggregator.placement.rendezvous_hash import choose_members
from ckpt.aggregator.records.file_record import FileLayout, Fragment, MemberObject, Stripe, drop_unused_objects, fragment_bytes
from ckpt.storage.base.checksums import cell_checksums
from ckpt.storage.base.errors import IntegrityError, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import ALIGNMENT, ByteProgress, Writer

log = logging.getLogger("ckpt")

_MAX_TRIES = 4
_THREADS = 4  # stripes at once: one waits for a disk while another is on the network


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
    """Return the layout with the lost fragments in new objects on other members. The record is not changed.

    Each fragment that is read, copied or computed is checked against the checksums that the record has of it.

    progress: called with the number of bytes just written, from many threads. excluded: members that never take a new fragment.
    allow_partial: a fragment that no member takes keeps its old position, whether it is lost or its member is only down.

    Raises Unavailable if too few fragments are left, and, without `allow_partial`, if there are too few members; IntegrityError
    if a new fragment differs from the lost one.
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
        lost = LostFragments(frozenset(failed))  # try again without the members that failed
        if allow_partial:
            excluded = {*excluded, *(h.member for h in layout.objects if h.name in failed)}
    raise Unavailable(f"{path} could not be rebuilt, as members failed in {_MAX_TRIES} tries in a row; try again")


def _with_previous_fragments(layout: FileLayout, previous: FileLayout) -> FileLayout:
    """Return the layout with the fragments of `previous` where its own are missing. Its objects include those of `previous`."""

    def completed(stripe: Stripe, old_stripe: Stripe) -> Stripe:
        used = {layout.objects[f.object_index].member for f in stripe.fragments if f is not None}
        both = zip(stripe.fragments, old_stripe.fragments, strict=True)
        return replace(stripe, fragments=tuple(new or _unless_on_members(layout, old, used) for new, old in both))

    return replace(layout, stripes=tuple(map(completed, layout.stripes, previous.stripes)))


def _unless_on_members(layout: FileLayout, fragment: Fragment | None, members: Collection[str]) -> Fragment | None:
    """Return the fragment; None if it is on one of these members, as two fragments of a stripe would be lost together."""
    return None if fragment is None or layout.objects[fragment.object_index].member in members else fragment


@dataclass(frozen=True, slots=True)
class _Targets:
    """The choice of members for new fragments."""

    member_io: MemberIO
    avoided: frozenset[str]
    """Members that have just lost a fragment: chosen only if there are no others."""
    excluded: frozenset[str]
    """Members that are never chosen."""
    allow_partial: bool
    """Whether fewer members than needed are acceptable, if there are no more."""

    def choose(self, key: str, count: int, used: list[str]) -> list[str]:
        """Return `count` members for new fragments of a stripe, none of which is in `used`.

        It prefers members that are up and not avoided. With `allow_partial` it may return fewer. Raises Unavailable if there
        are too few.
        """
        # The members in `used` are not chosen again, but no other member of their failure domains should be either.
        taken = [m for m in self.member_io.locations if m.name in used]
        every = [m for m in self.member_io.locations if m.name not in used and m.name not in self.excluded]
        responsive = [m for m in every if not self.member_io.fan_out.health.is_down(m.name)]
        found: list[str] = []
        for candidates in (
            [m for m in responsive if m.name not in self.avoided],
            [m for m in every if m.name not in self.avoided],
            responsive,
            every,
        ):
            found = choose_members(key, [*taken, *candidates], count, (), used)
            if len(found) == count:
                return found
            if self.allow_partial and candidates is responsive:  # members that are down would not take a fragment
                return found
        raise Unavailable(f"{count} more members are needed for fragments that were lost or are to move; add members")


def _rebuild_once(
    targets: _Targets, path: str, version: str, layout: FileLayout, previous: FileLayout, progress: ByteProgress
) -> tuple[FileLayout, set[str]]:
    """Return the layout with its missing fragments in new objects, and the names of objects that could not be made durable.

    previous: the layout before fragments were lost. A fragment that is only to move is read from where it was.
    """
    member_io = targets.member_io
    lost_bytes = sum(fragment_bytes(s.nbytes, layout.redundancy) * s.fragments.count(None) for s in layout.stripes)
    objects = _NewObjects(member_io, path, layout, lost_bytes // len(member_io.locations) // ALIGNMENT * ALIGNMENT)
    sources = SourceObjects(member_io)
    stripes = list(layout.stripes)

    def rebuild(index: int) -> None:
        stripe = layout.stripes[index]
        missing = [i for i, f in enumerate(stripe.fragments) if f is None]
        failpoint("repair.fragment")
        used = [layout.objects[f.object_index].member for f in stripe.fragments if f is not None]
        members = [m for m in targets.choose(f"{version}/{index}", len(missing), used) if objects.is_writable(m)]
        new = _assign_fragments(member_io, previous, index, missing, members)
        missing = list(new)
        if not missing:
            return
        count = layout.redundancy.data_fragments + len(missing)
        pages = max(1, -(-fragment_bytes(stripe.nbytes, layout.redundancy) // ALIGNMENT))
        scratch = member_io.scratch.take(count * pages * ALIGNMENT)
        memory = list(scratch.reshape(count, -1))
        data = _make_missing_fragments(
            sources=sources,
            path=path,
            layout=layout,
            stripe=stripe,
            missing=missing,
            previous=previous,
            index=index,
            memory=memory,
        )
        fragments = list(stripe.fragments)
        sums = {i: _fragment_checksums(path, previous, index, i, each) for i, each in data.items()}
        for i, member in new.items():
            if (location := objects.append(member, data[i])) is not None:
                fragments[i] = Fragment(*location, sums[i])
                progress(len(data[i]))
        stripes[index] = replace(stripe, fragments=tuple(fragments))
        member_io.scratch.give_back(scratch)

    incomplete = [index for index, stripe in enumerate(layout.stripes) if None in stripe.fragments]
    try:
        run_in_order(rebuild, incomplete, _THREADS, "ckpt-rebuild")
        failpoint("repair.commit")
        objects.commit()
    except BaseException:
        objects.abort()
        raise
    finally:
        sources.close()
    return FileLayout(layout.redundancy, tuple(objects.objects), tuple(stripes)), objects.failed


class _NewObjects:
    """The new objects for rebuilt fragments, one on each member. Safe to use from many threads.

    size_hint: the expected bytes of each object.
    """

    def __init__(self, member_io: MemberIO, path: str, layout: FileLayout, size_hint: int) -> None:
        self._member_io = member_io
        self._size_hint = size_hint
        self._path = path
        self._lock = threading.Lock()
        """Guards `_opening` and changes of `objects`. The lock `_opening[member]` guards `_writers[member]`. `failed` only
        grows."""
        self._writers: dict[str, tuple[int, Writer]] = {}
        self._opening: dict[str, threading.Lock] = {}
        self.objects = list(layout.objects)
        self.failed: set[str] = set()
        """The names of the objects that could not be written completely."""

    def is_writable(self, member: str) -> bool:
        """Return whether a member can be written to. Creates its object at the first call; a failure is logged once."""
        return self.objects[self._writer_of(member)[0]].name not in self.failed

    def append(self, member: str, data: np.ndarray) -> tuple[int, int] | None:
        """Append a fragment to the object of a member. Return the object's index and the position; None if it failed."""
        index, writer = self._writer_of(member)
        try:
            return index, writer.append(data.data)
        except StoreError as error:
            self._mark_failed(member, index, error)
            return None

    def _writer_of(self, member: str) -> tuple[int, Writer]:
        with self._lock:
            opening = self._opening.setdefault(member, threading.Lock())
        with opening:  # one lock per member: a slow member does not delay the others
            if member not in self._writers:
                name = object_name(new_version())
                with self._lock:
                    self.objects.append(MemberObject(member, name))
                    index = len(self.objects) - 1
                writer: Writer = _FailedWriter()
                try:
                    writer = self._member_io.open_members[member].store.create(name, self._size_hint)
                except StoreError as error:
                    self._mark_failed(member, index, error)
                self._writers[member] = index, writer
            return self._writers[member]

    def _mark_failed(self, member: str, index: int, error: StoreError) -> None:
        log.warning("%s: %s takes no more rebuilt fragments: %s", self._path, member, error)
        if isinstance(error, Unavailable):  # a member that is full or read-only still answers reads
            self._member_io.fan_out.health.record_failure(member, error)
        self.failed.add(self.objects[index].name)

    def commit(self) -> None:
        """Make the objects durable, and note those that fail in `failed`."""
        created = {m: writer for m, (_, writer) in self._writers.items() if not isinstance(writer, _FailedWriter)}
        calls = {member: commit_or_abort(writer) for member, writer in created.items()}
        _, errors = self._member_io.fan_out.ask(calls, self._member_io.commit_timeout_seconds)
        for member, error in errors.items():
            self._mark_failed(member, self._writers[member][0], error)

    def abort(self) -> None:
        """Delete the objects."""
        self._member_io.abort({member: writer for member, (_, writer) in self._writers.items()})


class _FailedWriter(Writer):
    """Stands for an object that could not be created."""

    def append(self, data: memoryview) -> int:
        raise Unavailable("the object could not be created")

    def commit(self) -> int:
        raise Unavailable("the object could not be created")

    def abort(self) -> None:
        """Do nothing: no object exists."""


def _assign_fragments(
    member_io: MemberIO, previous: FileLayout, index: int, missing: list[int], targets: list[str]
) -> dict[int, str]:
    """Return the member that takes each missing fragment of a stripe, by the number of the fragment.

    A member takes the fragment that it had before, as no member may have two of a stripe. The other members first take
    fragments that are gone, and then those of members that are down, which may come back.
    """
    fragments = previous.stripes[index].fragments
    old_members = {i: previous.objects[f.object_index].member for i in missing if (f := fragments[i]) is not None}
    old_fragments = {member: i for i, member in old_members.items()}
    assigned = {old_fragments[t]: t for t in targets if t in old_fragments}
    rest = sorted(
        (i for i in missing if i not in assigned),
        key=lambda i: i in old_members and member_io.fan_out.health.is_down(old_members[i]),
    )
    return assigned | dict(zip(rest, (t for t in targets if t not in old_fragments), strict=False))


def _make_missing_fragments(
    sources: SourceObjects,
    path: str,
    layout: FileLayout,
    stripe: Stripe,
    missing: list[int],
    previous: FileLayout,
    index: int,
    memory: list[np.ndarray],
) -> dict[int, np.ndarray]:
    """Return the missing fragments by number: read from where they were if they can be, else made from the others.

    Members that are down are read only where the others do not have enough fragments.

    previous: the layout before fragments were lost. memory: arrays for the missing fragments and for as many as a stripe needs.
    Raises Unavailable if too few fragments can be read.
    """
    redundancy = layout.redundancy
    length = fragment_bytes(stripe.nbytes, redundancy)
    objects = layout.objects
    answering = [i for i, f in enumerate(stripe.fragments) if f and not sources.is_down(objects[f.object_index])]
    are_enough = len(answering) >= redundancy.data_fragments
    moved: dict[int, np.ndarray] = {}
    for i in missing:
        old = previous.stripes[index].fragments[i]
        if old is not None and not (are_enough and sources.is_down(previous.objects[old.object_index])):
            with suppress(StoreError, IntegrityError):
                sources.read(previous.objects[old.object_index], old, memory[-1][:length])
                moved[i] = memory.pop()[:length]
    missing = [i for i in missing if i not in moved]
    if not missing:
        return moved
    usable = dict(list(moved.items())[: redundancy.data_fragments])
    rebuilt = {i: memory.pop()[:length] for i in missing}
    reasons = []
    others = [(i, f) for i, f in enumerate(stripe.fragments) if f is not None]
    unread = iter(sorted(others, key=lambda each: each[0] not in answering))

    def read_others(count: int) -> dict[int, np.ndarray]:
        """Return up to `count` of the fragments that were not read yet."""
        found: dict[int, np.ndarray] = {}
        while len(found) < count and (each := next(unread, None)) is not None:
            number, fragment = each
            data = memory.pop() if memory else np.empty(length, np.uint8)
            try:
                sources.read(objects[fragment.object_index], fragment, data[:length])
                found[number] = data[:length]
            except (StoreError, IntegrityError) as error:
                reasons.append(f"{objects[fragment.object_index].member}: {error}")
                memory.append(data)
        return found

    usable |= read_others(redundancy.data_fragments - len(usable))
    if len(usable) < redundancy.data_fragments:
        raise Unavailable(
            f"bytes {stripe.start} to {stripe.start + stripe.nbytes} of {path} can't be rebuilt: {len(usable)} fragments of "
            f"{redundancy} can be read, {redundancy.data_fragments} are needed "
            f"({'; '.join(reasons) or 'the others are lost'}); start the missing members"
        )
    if redundancy.data_fragments == 1:
        copy = next(iter(usable.values()))
        return moved | dict.fromkeys(missing, copy)
    reconstruction = VerifiedReconstruction(f"{path} in {sources.url}", previous, previous.stripes[index], 0)
    reconstruction.fill(rebuilt, usable, lambda: read_others(1))
    return moved | rebuilt


def _fragment_checksums(path: str, previous: FileLayout, index: int, number: int, data: np.ndarray) -> bytes:
    """Return the checksums of a new fragment.

    previous: the layout before fragments were lost. Raises IntegrityError if they differ from those of the previous fragment
    or of another copy.
    """
    computed, fragments = cell_checksums(data.data), previous.stripes[index].fragments
    compared = fragments if previous.redundancy.data_fragments == 1 else fragments[number : number + 1]
    for fragment in compared:
        if fragment is not None and fragment.cell_checksums != computed:
            member = previous.objects[fragment.object_index].member
            raise IntegrityError(
                f"{path}: a new fragment {number} differs from the one on {member}; the memory of this host may be faulty: try "
                "again on another host"
            )
    return computed
