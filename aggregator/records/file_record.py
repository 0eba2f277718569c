"""The record of a path, which makes a file or a folder exist, and its encoding (docs/design/namespace.md).

A file is a sequence of stripes, in the order in which they were appended. A stripe is stored as fragments, each on another
member: copies of the whole stripe, or the fragments of an erasure code, of which each data fragment is a contiguous part of the
stripe. All fragments that a member stores of one file are in one object of that member, at the positions that the record names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgpack

from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.storage.base.errors import IntegrityError, is_transient
from ckpt.storage.base.store import ALIGNMENT
from ckpt.storage.registers.base import RegisterValue

INLINE_FILE_BYTES = 32 << 10
"""A file up to this size is stored in its record, on every member of the record's replica set."""

USUAL_STRIPE_BYTES = 8 << 20
"""The bytes of most appends to a large file, and so of most stripes."""

_MAX_HISTORY = 8
"""The number of replaced versions that a record lists."""

RecordKind = Literal["file", "folder", "deleted"]

_RECORD_KINDS: tuple[RecordKind, ...] = ("file", "folder", "deleted")


@dataclass(frozen=True, slots=True)
class RecordHead:
    """The part of a record that a listing reads."""

    kind: RecordKind
    nbytes: int
    created: float
    """Seconds since 1970."""
    modified: float
    version: str
    """A random name of the content; each content that a path ever had has its own."""
    history: tuple[str, ...] = ()
    """The versions that this one replaced, the newest first. They show a client whose publication had an unknown outcome that
    it was published and replaced. To publish it again would undo later changes, and name deleted objects."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment of a stripe."""

    object_index: int
    """The index of its member object in `FileLayout.objects`."""
    position: int
    """Its first byte in that object."""
    cell_checksums: bytes
    """The checksum of each of its cells; see storage/base/checksums.py."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """A contiguous part of a file, stored as fragments.

    `fragments[:k]` are its bytes in order, and the others are parity. All have the length that `fragment_bytes` returns; the
    last data fragment is filled up with zeros. A missing fragment is None.
    """

    start: int
    """Its first byte in the file. Bytes between two stripes are zeros."""
    nbytes: int
    """The number of bytes that the fragments encode."""
    fragments: tuple[Fragment | None, ...]
    visible_bytes: int
    """The number of its bytes that belong to the file: fewer than `nbytes` where the file was truncated within this stripe."""


@dataclass(frozen=True, slots=True)
class MemberObject:
    """An object on a member, with fragments of one file."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where the bytes of a file are stored."""

    redundancy: Redundancy
    objects: tuple[MemberObject, ...]
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The record of a path: a file, a folder or a tombstone."""

    head: RecordHead
    inline_data: bytes | None = None
    """The content of a small file."""
    layout: FileLayout | None = None
    """Where the content of a larger file is stored."""
    rename_token: str = ""
    """Names an unfinished rename; empty if there is none. During a rename another path may name the same objects, so only a
    repair may delete them, after a scrub of all records."""

    @property
    def exists(self) -> bool:
        """Whether it is a file or a folder, and not a tombstone."""
        return self.head.kind != "deleted"


def next_head(head: RecordHead, previous: FileRecord | None) -> RecordHead:
    """Return a head with the history and the time of creation that follow from the previous record of the path."""
    if previous is None:
        return head
    history = (previous.head.version, *previous.head.history)[:_MAX_HISTORY]
    return replace(head, history=history, created=previous.head.created if previous.exists else head.created)


def is_history_truncated(file: FileRecord | None, versions: Collection[str] = ()) -> bool:
    """Return whether the history of a path is full and has none of `versions`: it may lack versions that came after them."""
    return file is not None and len(file.head.history) >= _MAX_HISTORY and not any(has_version(file, v) for v in versions)


def has_added_objects(current: FileRecord | None, file: FileRecord, base: FileRecord | None) -> bool:
    """Return whether the current record names objects of `file` that `base` lacks.

    If `file` was appended to `base`, it was published then, and others may have appended to it since.
    """
    of_current, of_file, of_base = (
        {h.name for h in f.layout.objects} if f and f.layout else set() for f in (current, file, base)
    )
    return bool(of_current & (of_file - of_base))


def has_version(file: FileRecord | None, version: str) -> bool:
    """Return whether a path has, or recently had, the content of this version."""
    return file is not None and (file.head.version == version or version in file.head.history)


def note_replaced(proposed: dict[str, FileRecord], current: FileRecord) -> None:
    """Add a record that a proposal replaces, by version. One with a rename token stays: a member may lack the token."""
    earlier = proposed.get(current.head.version)
    if earlier is None or not earlier.rename_token:
        proposed[current.head.version] = current


def replaced_record(proposed: Mapping[str, FileRecord], after: FileRecord | None, version: str) -> FileRecord | None:
    """Return the record that a version replaced; None if the record of the path after that does not show which one.

    It need not be the one that the last proposal replaces: an outdated member, or another proposal, may be the source of that.

    proposed: the records that proposals of this version replace, as `note_replaced` has added them.
    """
    versions = () if after is None else (after.head.version, *after.head.history)
    followed = dict(zip(versions, versions[1:], strict=False))
    return proposed.get(followed.get(version, ""))


def fragment_bytes(nbytes: int, redundancy: Redundancy) -> int:
    """Return the length of each fragment of a stripe of `nbytes`: for erasure codes a multiple of ALIGNMENT, for O_DIRECT."""
    if redundancy.data_fragments == 1:
        return nbytes
    return -(-nbytes // (redundancy.data_fragments * ALIGNMENT)) * ALIGNMENT


def has_same_stripes(one: Sequence[Stripe], other: Sequence[Stripe]) -> bool:
    """Return whether two sequences of stripes have the same bytes, on whichever members: a repair moves fragments."""

    def same(a: Fragment | None, b: Fragment | None) -> bool:
        return a is None or b is None or a.cell_checksums == b.cell_checksums

    return len(one) == len(other) and all(
        (a.start, a.nbytes, a.visible_bytes) == (b.start, b.nbytes, b.visible_bytes)
        and all(map(same, a.fragments, b.fragments))
        for a, b in zip(one, other, strict=True)
    )


def has_same_content(one: FileRecord, other: FileRecord) -> bool:
    """Return whether two files have the same bytes, as far as their records show it."""
    if one.layout is None or other.layout is None:
        return (one.inline_data, one.layout) == (other.inline_data, other.layout)
    return one.layout.redundancy == other.layout.redundancy and has_same_stripes(one.layout.stripes, other.layout.stripes)


def rebase_layout(layout: FileLayout, current: FileLayout, length: int) -> FileLayout:
    """Return a layout that was appended to a file, rebased on the `current` layout of that file: repairs may move fragments.

    The result has the stripes of `current`, cut to `length`, and after them the stripes that were added.

    length: that of the file with `layout`, which may be shorter than the file to which it was appended.
    """
    objects, kept = list(current.objects), truncate_stripes(current.stripes, length)

    def rebased(fragment: Fragment | None) -> Fragment | None:
        if fragment is None:
            return None
        member_object = layout.objects[fragment.object_index]
        if member_object not in objects:
            objects.append(member_object)
        return replace(fragment, object_index=objects.index(member_object))

    added = [replace(s, fragments=tuple(map(rebased, s.fragments))) for s in layout.stripes[len(kept) :]]
    return FileLayout(current.redundancy, tuple(objects), (*kept, *added))


def min_fragments(layout: FileLayout, stripes: Sequence[Stripe] | None = None) -> int:
    """Return the number of fragments of the stripe that has the fewest, of `stripes` or of all stripes."""
    chosen = layout.stripes if stripes is None else stripes
    return min((sum(f is not None for f in s.fragments) for s in chosen), default=layout.redundancy.total_fragments)


def truncate_stripes(stripes: Sequence[Stripe], length: int) -> tuple[Stripe, ...]:
    """Return the stripes of a file that was truncated to `length`, so that later appends follow them."""
    return tuple(
        replace(s, visible_bytes=length - s.start) if s.start + s.visible_bytes > length else s
        for s in stripes
        if s.start < length
    )


def drop_unused_objects(layout: FileLayout) -> FileLayout:
    """Return the layout without objects that have no fragment."""
    used = sorted({f.object_index for s in layout.stripes for f in s.fragments if f is not None})
    new_index = {old: new for new, old in enumerate(used)}

    def renumbered(fragment: Fragment | None) -> Fragment | None:
        return None if fragment is None else replace(fragment, object_index=new_index[fragment.object_index])

    stripes = tuple(replace(s, fragments=tuple(map(renumbered, s.fragments))) for s in layout.stripes)
    return FileLayout(layout.redundancy, tuple(layout.objects[i] for i in used), stripes)


# --- encoding --------------------------------------------------------------------------------------------------


def encode_record(file: FileRecord) -> RegisterValue:
    """Return a record as the value of a register."""
    head = file.head
    packed = msgpack.packb(
        [_RECORD_KINDS.index(head.kind), head.nbytes, head.created, head.modified, head.version, list(head.history)]
    )
    if file.inline_data is not None:
        body = msgpack.packb([0, file.inline_data])
    elif file.layout is not None:
        layout = file.layout
        body = msgpack.packb(
            [
                1,
                [layout.redundancy.data_fragments, layout.redundancy.parity_fragments],
                [[h.member, h.name] for h in layout.objects],
                [
                    [
                        s.start,
                        s.nbytes,
                        s.visible_bytes,
                        [None if f is None else [f.object_index, f.position, f.cell_checksums] for f in s.fragments],
                    ]
                    for s in layout.stripes
                ],
                file.rename_token,
            ]
        )
    else:
        body = b""
    return RegisterValue(packed, body)


def decode_record_head(path: str, data: bytes) -> RecordHead:
    """Return the head of the record of a path. Raises IntegrityError if it can't be read."""
    try:
        kind, nbytes, created, modified, version, history = msgpack.unpackb(data)
        return RecordHead(_RECORD_KINDS[kind], nbytes, created, modified, version, tuple(history))
    except Exception as error:  # msgpack raises many kinds for invalid bytes
        if is_transient(error):
            raise
        raise _unreadable_error(path, error) from error


def decode_record(path: str, value: RegisterValue) -> FileRecord:
    """Return the record of a path: the inverse of `encode_record`. Raises IntegrityError if it can't be read."""
    head = decode_record_head(path, value.head)
    if not value.body:
        return FileRecord(head)
    try:
        storage_kind, *rest = msgpack.unpackb(value.body, max_bin_len=1 << 30)
        return (
            FileRecord(head, inline_data=rest[0])
            if storage_kind == 0
            else FileRecord(head, layout=_decode_layout(*rest[:3]), rename_token=rest[3])
        )
    except Exception as error:
        if is_transient(error):
            raise
        raise _unreadable_error(path, error) from error


def _decode_layout(redundancy: Sequence[int], objects: Sequence[Any], stripes: Sequence[Any]) -> FileLayout:
    return FileLayout(
        Redundancy(*redundancy),
        tuple(MemberObject(*h) for h in objects),
        tuple(
            Stripe(start, nbytes, tuple(None if f is None else Fragment(*f) for f in fragments), visible_bytes)
            for start, nbytes, visible_bytes, fragments in stripes
        ),
    )


def _unreadable_error(path: str, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"the record of {path} can't be read ({error}); install a newer ckpt-store, or if it is damaged write the file under "
        "another name"
    )
