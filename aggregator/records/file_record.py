"""What the namespace knows of a path: the record that makes a file exist. docs/design/namespace.md has the encoding.

A file is cut into pieces, in the order in which they were appended. A piece lies on as many members as the redundancy asks
for, in one fragment each: copies of all of it, or the shares of an erasure code, contiguous. All fragments that a member
holds of one file stand in one object of that member, at the places that the record names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgpack

from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.registers.base import RegisterValue

INLINE_BYTES = 32 << 10
"""A file up to this size lies in its record, on every member that keeps that."""

_MAX_HISTORY = 8

RecordKind = Literal["file", "folder", "deleted"]

_RECORD_KINDS: tuple[RecordKind, ...] = ("file", "folder", "deleted")


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What a listing shows."""

    kind: RecordKind
    nbytes: int
    created: float
    """Seconds since 1970."""
    modified: float
    version: str
    """Random; another for every content that a path ever had."""
    history: tuple[str, ...] = ()
    """Versions that this one replaced, the newest first. Who does not know whether its own was ever there looks here: to put
    it there again would undo what came after, and name objects that are gone."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A share of a piece."""

    object_index: int
    """Index in `Layout.holders`."""
    position: int
    """In that member's object."""
    cell_checksums: bytes
    """Checksums, see storage/base/checksums.py."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """A part of a file: `fragments[:k]` are its bytes in order, each of `share_bytes` but the last, which may be shorter
    (it is stored as long as the others, with zeros); the rest is parity. A missing one is None."""

    start: int
    """In the file. What lies between two pieces is zeros."""
    nbytes: int
    """That the fragments were made of."""
    fragments: tuple[Fragment | None, ...]
    visible_bytes: int
    """Bytes that belong to the file: fewer where it was cut in this piece."""


@dataclass(frozen=True, slots=True)
class MemberObject:
    """An object on a member that holds fragments of a file."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where the bytes of a file are."""

    redundancy: Redundancy
    objects: tuple[MemberObject, ...]
    stripes: tuple[Stripe, ...]


@dataclass(frozen=True, slots=True)
class PathRecord:
    """All that is known of a path."""

    head: RecordHead
    inline_data: bytes | None = None
    """The content of a small file."""
    layout: FileLayout | None = None
    """Where that of a large one is."""
    rename_token: str = ""
    """Not empty: another path may name the same objects, as in the middle of a renaming: only a scrub may delete them. It says
    which renaming."""

    @property
    def exists(self) -> bool:
        return self.head.kind != "deleted"


def next_head(head: RecordHead, previous: PathRecord | None) -> RecordHead:
    """A head as the next of a path, after what is there."""
    if previous is None:
        return head
    history = (previous.head.version, *previous.head.history)[:_MAX_HISTORY]
    return replace(head, history=history, created=previous.head.created if previous.exists else head.created)


def is_history_truncated(file: PathRecord | None, base: PathRecord) -> bool:
    """Whether a version may have come after `base`, and gone out of the history of a path since."""
    return file is not None and len(file.head.history) >= _MAX_HISTORY and not has_version(file, base.head.version)


def has_added_objects(current: PathRecord | None, file: PathRecord, base: PathRecord | None) -> bool:
    """Whether what is there was written on a file: it has objects of it that are not those of `base`."""
    of_there, of_file, before = ({h.name for h in f.layout.objects} if f and f.layout else set() for f in (current, file, base))
    return bool(of_there & (of_file - before))


def has_version(file: PathRecord | None, version: str) -> bool:
    """Whether a path has, or had not long ago, the content of this version."""
    return file is not None and (file.head.version == version or version in file.head.history)


def fragment_bytes(nbytes: int, redundancy: Redundancy) -> int:
    """The length of each fragment of a piece: whole pages, so that each can be written with O_DIRECT."""
    if redundancy.data_fragments == 1:
        return nbytes
    return -(-nbytes // (redundancy.data_fragments * 4096)) * 4096


def has_same_stripes(one: Sequence[Stripe], other: Sequence[Stripe]) -> bool:
    """Whether these are the same bytes, wherever they lie: a repair moves them."""

    def same(a: Fragment | None, b: Fragment | None) -> bool:
        return a is None or b is None or a.cell_checksums == b.cell_checksums

    return len(one) == len(other) and all(
        (p.start, p.nbytes, p.visible_bytes) == (q.start, q.nbytes, q.visible_bytes)
        and all(map(same, p.fragments, q.fragments))
        for p, q in zip(one, other, strict=True)
    )


def has_same_content(one: PathRecord, other: PathRecord) -> bool:
    """Whether two files have the same bytes, as far as their records tell."""
    if one.layout is None or other.layout is None:
        return (one.inline_data, one.layout) == (other.inline_data, other.layout)
    return one.layout.redundancy == other.layout.redundancy and has_same_stripes(one.layout.stripes, other.layout.stripes)


def written_on(layout: FileLayout, base: FileLayout, current: FileLayout) -> FileLayout:
    """A layout that was written on `base`, on what that is now: its new pieces behind those that were moved meanwhile."""
    holders = list(current.objects)

    def moved(fragment: Fragment | None) -> Fragment | None:
        if fragment is None:
            return None
        holder = layout.objects[fragment.object_index]
        if holder not in holders:
            holders.append(holder)
        return replace(fragment, object_index=holders.index(holder))

    added = [replace(p, fragments=tuple(map(moved, p.fragments))) for p in layout.stripes[len(base.stripes) :]]
    return FileLayout(current.redundancy, tuple(holders), (*current.stripes, *added))


def min_fragments(layout: FileLayout, stripes: Sequence[Stripe] | None = None) -> int:
    """The fragments of that piece, of all or of these, which has the fewest."""
    given = layout.stripes if stripes is None else stripes
    return min((sum(f is not None for f in p.fragments) for p in given), default=layout.redundancy.total_fragments)


def drop_unused_objects(layout: FileLayout) -> FileLayout:
    """The layout without holders that hold nothing."""
    used = sorted({f.object_index for p in layout.stripes for f in p.fragments if f is not None})
    number = {old: new for new, old in enumerate(used)}
    pieces = tuple(
        replace(p, fragments=tuple(None if f is None else replace(f, object_index=number[f.object_index]) for f in p.fragments))
        for p in layout.stripes
    )
    return FileLayout(layout.redundancy, tuple(layout.objects[i] for i in used), pieces)


# --- encoding --------------------------------------------------------------------------------------------------


def encode_record(file: PathRecord) -> RegisterValue:
    """As a register's value."""
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
                        p.start,
                        p.nbytes,
                        p.visible_bytes,
                        [None if f is None else [f.object_index, f.position, f.cell_checksums] for f in p.fragments],
                    ]
                    for p in layout.stripes
                ],
                file.rename_token,
            ]
        )
    else:
        body = b""
    return RegisterValue(packed, body)


def decode_record_head(path: str, data: bytes) -> RecordHead:
    """The head of a record. Raises IntegrityError."""
    try:
        kind, nbytes, created, modified, version, history = msgpack.unpackb(data)
        return RecordHead(_RECORD_KINDS[kind], nbytes, created, modified, version, tuple(history))
    except Exception as error:  # whatever the library makes of other bytes
        raise _unreadable_error(path, error) from error


def decode_record(path: str, value: RegisterValue) -> PathRecord:
    """The counterpart of `encode`. Raises IntegrityError."""
    head = decode_record_head(path, value.head)
    if not value.body:
        return PathRecord(head)
    try:
        what, *rest = msgpack.unpackb(value.body, max_bin_len=1 << 30)
        return (
            PathRecord(head, inline_data=rest[0])
            if what == 0
            else PathRecord(head, layout=_decode_layout(*rest[:3]), rename_token=rest[3])
        )
    except Exception as error:
        raise _unreadable_error(path, error) from error


def _decode_layout(redundancy: Sequence[int], objects: Sequence[Any], stripes: Sequence[Any]) -> FileLayout:
    return FileLayout(
        Redundancy(*redundancy),
        tuple(MemberObject(*h) for h in objects),
        tuple(Stripe(s, n, tuple(None if f is None else Fragment(*f) for f in fs), reach) for s, n, reach, fs in stripes),
    )


def _unreadable_error(path: str, error: Exception) -> IntegrityError:
    return IntegrityError(f"the record of {path} can't be read ({error}); it was written by a newer version, or is damaged")
