"""Which records of deleted files were collected lately, and by which fence number.

A client that finds nothing where it may have published a file asks for it. The file may have been there and have been deleted
only if its record was collected since: otherwise a deleted file leaves a record. A change of the ring collects nothing.

The names are agreed before anything is forgotten. So a client that finds that a record is missing finds its name too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgpack
import xxhash

from ckpt.storage.decode import Malformed, decode
from ckpt.storage.fence_numbers import in_order
from ckpt.storage.registers import Value

if TYPE_CHECKING:
    from ckpt.aggregator.namespace import Namespace

REGISTER = "collected"
"""The register's name, which no path has."""

_NAMES = 20_000
"""So many names are kept at most, of the collections that were the last."""
_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Collection:
    number: int
    """The fence number by which it was done, as `in_order` has it."""
    names: bytes
    """A hash of each name, one after the other."""

    def has(self, name: bytes) -> bool:
        return any(self.names[at : at + _BYTES] == name for at in range(0, len(self.names), _BYTES))


@dataclass(frozen=True, slots=True)
class _Known:
    above: int
    """Of collections up to this number the names are not known."""
    collections: tuple[_Collection, ...]


def note_collection(namespace: Namespace, number: int, names: Collection[str]) -> None:
    """Agree with all members that these records are collected by this number from now on."""
    now = _Collection(in_order(number), b"".join(map(_hash, sorted(names))))

    def add(_: str, value: Value | None) -> Value | None:
        known = _decoded(value) or _Known(now.number, ())
        return None if now in known.collections else _encoded(_cut(replace(known, collections=(*known.collections, now))))

    namespace.office(REGISTER, add)


def collected_since(namespace: Namespace, path: str, number: int) -> bool:
    """Whether the record of a deleted file may have been collected since a client published the path by this number."""
    known, since = _decoded(namespace.read_records([REGISTER])[REGISTER]), in_order(number)
    if known is None or since < known.above:
        return True
    return any(each.number > since and each.has(_hash(f"/{path}")) for each in known.collections)


def _cut(known: _Known) -> _Known:
    """Without the oldest collections, where there are too many names."""
    above, left = known.above, known.collections
    while sum(len(each.names) for each in left) > _NAMES * _BYTES:
        above, left = max(above, left[0].number), left[1:]
    return _Known(above, left)


def _hash(name: str) -> bytes:
    return xxhash.xxh3_64(name.encode()).digest()


def _encoded(known: _Known) -> Value:
    return Value(msgpack.packb([known.above]), msgpack.packb([[each.number, each.names] for each in known.collections]))


def _decoded(value: Value | None) -> _Known | None:
    """Of an agreed value; None where it can't be read."""
    if value is None:
        return _Known(0, ())
    try:
        above, rows = msgpack.unpackb(value.head)[0], msgpack.unpackb(value.body)
        return decode(_Known, {"above": above, "collections": [{"number": n, "names": names} for n, names in rows]})
    except (Malformed, ValueError, TypeError, LookupError):
        return None
