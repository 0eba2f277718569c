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

from ckpt.aggregator.redundancy import Redundancy
from ckpt.storage.errors import IntegrityError
from ckpt.storage.registers import Value

INLINE_BYTES = 32 << 10
"""A file up to this size lies in its record, on every member that keeps that."""

_HISTORY = 8

Kind = Literal["file", "folder", "deleted"]

_KINDS: tuple[Kind, ...] = ("file", "folder", "deleted")


@dataclass(frozen=True, slots=True)
class Head:
    """What a listing shows."""

    kind: Kind
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

    holder: int
    """Index in `Layout.holders`."""
    position: int
    """In that member's object."""
    cells: bytes
    """Checksums, see storage/sums.py."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: `fragments[:k]` are its bytes in order, each of `share_bytes` but the last, which may be shorter
    (it is stored as long as the others, with zeros); the rest is parity. A missing one is None."""

    start: int
    """In the file. What lies between two pieces is zeros."""
    nbytes: int
    """That the fragments were made of."""
    fragments: tuple[Fragment | None, ...]
    reach: int
    """Bytes that belong to the file: fewer where it was cut in this piece."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An object on a member that holds fragments of a file."""

    member: str
    name: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bytes of a file are."""

    redundancy: Redundancy
    holders: tuple[Holder, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class File:
    """All that is known of a path."""

    head: Head
    data: bytes | None = None
    """The content of a small file."""
    layout: Layout | None = None
    """Where that of a large one is."""
    shared: str = ""
    """Not empty: another path may name the same objects, as in the middle of a renaming: only a scrub may delete them. It says
    which renaming."""

    @property
    def exists(self) -> bool:
        return self.head.kind != "deleted"


def following(head: Head, before: File | None) -> Head:
    """A head as the next of a path, after what is there."""
    if before is None:
        return head
    history = (before.head.version, *before.head.history)[:_HISTORY]
    return replace(head, history=history, created=before.head.created if before.exists else head.created)


def forgets(file: File | None, base: File) -> bool:
    """Whether a version may have come after `base`, and gone out of the history of a path since."""
    return file is not None and len(file.head.history) >= _HISTORY and not had(file, base.head.version)


def shares_objects(there: File | None, file: File, base: File | None) -> bool:
    """Whether what is there was written on a file: it has objects of it that are not those of `base`."""
    of_there, of_file, before = ({h.name for h in f.layout.holders} if f and f.layout else set() for f in (there, file, base))
    return bool(of_there & (of_file - before))


def had(file: File | None, version: str) -> bool:
    """Whether a path has, or had not long ago, the content of this version."""
    return file is not None and (file.head.version == version or version in file.head.history)


def share_bytes(nbytes: int, redundancy: Redundancy) -> int:
    """The length of each fragment of a piece: whole pages, so that each can be written with O_DIRECT."""
    if redundancy.data == 1:
        return nbytes
    return -(-nbytes // (redundancy.data * 4096)) * 4096


def same_pieces(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    """Whether these are the same bytes, wherever they lie: a repair moves them."""

    def same(a: Fragment | None, b: Fragment | None) -> bool:
        return a is None or b is None or a.cells == b.cells

    return len(one) == len(other) and all(
        (p.start, p.nbytes, p.reach) == (q.start, q.nbytes, q.reach) and all(map(same, p.fragments, q.fragments))
        for p, q in zip(one, other, strict=True)
    )


def same_content(one: File, other: File) -> bool:
    """Whether two files have the same bytes, as far as their records tell."""
    if one.layout is None or other.layout is None:
        return (one.data, one.layout) == (other.data, other.layout)
    return one.layout.redundancy == other.layout.redundancy and same_pieces(one.layout.pieces, other.layout.pieces)


def written_on(layout: Layout, base: Layout, now: Layout) -> Layout:
    """A layout that was written on `base`, on what that is now: its new pieces behind those that were moved meanwhile."""
    holders = list(now.holders)

    def moved(fragment: Fragment | None) -> Fragment | None:
        if fragment is None:
            return None
        holder = layout.holders[fragment.holder]
        if holder not in holders:
            holders.append(holder)
        return replace(fragment, holder=holders.index(holder))

    added = [replace(p, fragments=tuple(map(moved, p.fragments))) for p in layout.pieces[len(base.pieces) :]]
    return Layout(now.redundancy, tuple(holders), (*now.pieces, *added))


def fewest(layout: Layout, pieces: Sequence[Piece] | None = None) -> int:
    """The fragments of that piece, of all or of these, which has the fewest."""
    given = layout.pieces if pieces is None else pieces
    return min((sum(f is not None for f in p.fragments) for p in given), default=layout.redundancy.fragments)


def compact(layout: Layout) -> Layout:
    """The layout without holders that hold nothing."""
    used = sorted({f.holder for p in layout.pieces for f in p.fragments if f is not None})
    number = {old: new for new, old in enumerate(used)}
    pieces = tuple(
        replace(p, fragments=tuple(None if f is None else replace(f, holder=number[f.holder]) for f in p.fragments))
        for p in layout.pieces
    )
    return Layout(layout.redundancy, tuple(layout.holders[i] for i in used), pieces)


# --- encoding --------------------------------------------------------------------------------------------------


def encode(file: File) -> Value:
    """As a register's value."""
    head = file.head
    packed = msgpack.packb(
        [_KINDS.index(head.kind), head.nbytes, head.created, head.modified, head.version, list(head.history)]
    )
    if file.data is not None:
        body = msgpack.packb([0, file.data])
    elif file.layout is not None:
        layout = file.layout
        body = msgpack.packb(
            [
                1,
                [layout.redundancy.data, layout.redundancy.parity],
                [[h.member, h.name] for h in layout.holders],
                [
                    [p.start, p.nbytes, p.reach, [None if f is None else [f.holder, f.position, f.cells] for f in p.fragments]]
                    for p in layout.pieces
                ],
                file.shared,
            ]
        )
    else:
        body = b""
    return Value(packed, body)


def decode_head(path: str, data: bytes) -> Head:
    """The head of a record. Raises IntegrityError."""
    try:
        kind, nbytes, created, modified, version, history = msgpack.unpackb(data)
        return Head(_KINDS[kind], nbytes, created, modified, version, tuple(history))
    except Exception as error:  # whatever the library makes of other bytes
        raise _unreadable(path, error) from error


def decode(path: str, value: Value) -> File:
    """The counterpart of `encode`. Raises IntegrityError."""
    head = decode_head(path, value.head)
    if not value.body:
        return File(head)
    try:
        what, *rest = msgpack.unpackb(value.body, max_bin_len=1 << 30)
        return File(head, data=rest[0]) if what == 0 else File(head, layout=_layout(*rest[:3]), shared=rest[3])
    except Exception as error:
        raise _unreadable(path, error) from error


def _layout(redundancy: Sequence[int], holders: Sequence[Any], pieces: Sequence[Any]) -> Layout:
    return Layout(
        Redundancy(*redundancy),
        tuple(Holder(*h) for h in holders),
        tuple(Piece(s, n, tuple(None if f is None else Fragment(*f) for f in fs), reach) for s, n, reach, fs in pieces),
    )


def _unreadable(path: str, error: Exception) -> IntegrityError:
    return IntegrityError(f"the record of {path} can't be read ({error}); it was written by a newer version, or is damaged")
