"""The agreed log of the tombstones that were collected lately, each with the fence number of its collection.

It is for a client that finds no record where it may have published a file. A deleted file leaves a tombstone, so the file can
only have existed and been deleted if its tombstone was collected since. A ring change collects nothing.

The names are agreed before a register is forgotten. So a client that finds a record missing finds its name in the log.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import msgpack
import xxhash

from ckpt.aggregator.records.namespace_records import NamespaceRecords
from ckpt.storage.base.checked_decode import Malformed, decode
from ckpt.storage.registers.base import RegisterValue
from ckpt.storage.registers.fence_numbers import order_key

COLLECTED_REGISTER = "collected"
"""The name of the log's register, which no path has."""

_MAX_NAMES = 20_000
"""The most names that the log has. The oldest collections are dropped first."""
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Collection:
    """One collection of tombstones."""

    number: int
    """The `order_key` of the collection's fence number."""
    names: bytes
    """The concatenated hashes of the names."""

    def has(self, name: bytes) -> bool:
        """Return whether the name with this hash was collected."""
        return any(self.names[at : at + _HASH_BYTES] == name for at in range(0, len(self.names), _HASH_BYTES))


@dataclass(frozen=True, slots=True)
class CollectionLog:
    """The value of the register."""

    above: int
    """The log lists every collection above this number, and perhaps not every one up to it."""
    collections: tuple[_Collection, ...]
    """The oldest first."""

    def with_collection(self, fence_number: int, names: Collection[str]) -> CollectionLog:
        """Return the log with a collection of these names, without the oldest collections if it has too many names."""
        collection = _Collection(order_key(fence_number), b"".join(map(_hash, sorted(names))))
        return (
            self if collection in self.collections else _drop_oldest(replace(self, collections=(*self.collections, collection)))
        )

    def may_have(self, name: str, fence_number: int) -> bool:
        """Return whether this name may have been collected since a client published it with this fence number."""
        since = order_key(fence_number)
        return since < self.above or any(each.number > since and each.has(_hash(name)) for each in self.collections)


def record_collection(records: NamespaceRecords, fence_number: int, names: Collection[str]) -> None:
    """Add these names to the log, before their records are collected with this fence number."""

    def add(_: str, value: RegisterValue | None) -> RegisterValue | None:
        before = _decode_log(value) or CollectionLog(order_key(fence_number), ())
        after = before.with_collection(fence_number, names)
        return None if after is before else _encode_log(after)

    records.update_register(COLLECTED_REGISTER, add)


def is_collected_since(records: NamespaceRecords, path: str, fence_number: int) -> bool:
    """Return whether the tombstone of a path may have been collected since a client published it with this fence number."""
    collection_log = _decode_log(records.read_records([COLLECTED_REGISTER])[COLLECTED_REGISTER])
    return collection_log is None or collection_log.may_have(f"/{path}", fence_number)


def _drop_oldest(collection_log: CollectionLog) -> CollectionLog:
    """Return the log without its oldest collections, if it has too many names."""
    above, collections = collection_log.above, collection_log.collections
    while sum(len(each.names) for each in collections) > _MAX_NAMES * _HASH_BYTES:
        above, collections = max(above, collections[0].number), collections[1:]
    return CollectionLog(above, collections)


def _hash(name: str) -> bytes:
    return xxhash.xxh3_64(name.encode()).digest()


def _encode_log(collection_log: CollectionLog) -> RegisterValue:
    return RegisterValue(
        msgpack.packb([collection_log.above]), msgpack.packb([[each.number, each.names] for each in collection_log.collections])
    )


def _decode_log(value: RegisterValue | None) -> CollectionLog | None:
    """Return the log of an agreed value; None if it can't be read."""
    if value is None:
        return CollectionLog(0, ())
    try:
        above, rows = msgpack.unpackb(value.head)[0], msgpack.unpackb(value.body)
        return decode(CollectionLog, {"above": above, "collections": [{"number": n, "names": names} for n, names in rows]})
    except (Malformed, ValueError, TypeError, LookupError):
        return None
