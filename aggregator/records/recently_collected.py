"""Which records of deleted files were collected lately, and by which fence number.

A client that finds nothing where it may have published a file asks for it. The file may have been there and have been deleted
only if its record was collected since: otherwise a deleted file leaves a record. A change of the ring collects nothing.

The names are agreed before anything is forgotten. So a client that finds that a record is missing finds its name too.
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
"""The register's name, which no path has."""

_MAX_NAMES = 20_000
"""So many names are kept at most, of the collections that were the last."""
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Collection:
    number: int
    """The fence number by which it was done, as `in_order` has it."""
    names: bytes
    """A hash of each name, one after the other."""

    def has(self, name: bytes) -> bool:
        return any(self.names[at : at + _HASH_BYTES] == name for at in range(0, len(self.names), _HASH_BYTES))


@dataclass(frozen=True, slots=True)
class _CollectionLog:
    above: int
    """Of collections up to this number the names are not known."""
    collections: tuple[_Collection, ...]


def record_collection(records: NamespaceRecords, fence_number: int, names: Collection[str]) -> None:
    """Agree with all members that these records are collected by this number from now on."""
    collection = _Collection(order_key(fence_number), b"".join(map(_hash, sorted(names))))

    def add(_: str, value: RegisterValue | None) -> RegisterValue | None:
        collection_log = _decode_log(value) or _CollectionLog(collection.number, ())
        return (
            None
            if collection in collection_log.collections
            else _encode_log(_drop_oldest(replace(collection_log, collections=(*collection_log.collections, collection))))
        )

    records.update_register(COLLECTED_REGISTER, add)


def is_collected_since(records: NamespaceRecords, path: str, fence_number: int) -> bool:
    """Whether the record of a deleted file may have been collected since a client published the path by this number."""
    collection_log, since = (
        _decode_log(records.read_records([COLLECTED_REGISTER])[COLLECTED_REGISTER]),
        order_key(fence_number),
    )
    if collection_log is None or since < collection_log.above:
        return True
    return any(each.number > since and each.has(_hash(f"/{path}")) for each in collection_log.collections)


def _drop_oldest(collection_log: _CollectionLog) -> _CollectionLog:
    """Without the oldest collections, where there are too many names."""
    above, collections = collection_log.above, collection_log.collections
    while sum(len(each.names) for each in collections) > _MAX_NAMES * _HASH_BYTES:
        above, collections = max(above, collections[0].number), collections[1:]
    return _CollectionLog(above, collections)


def _hash(name: str) -> bytes:
    return xxhash.xxh3_64(name.encode()).digest()


def _encode_log(collection_log: _CollectionLog) -> RegisterValue:
    return RegisterValue(
        msgpack.packb([collection_log.above]), msgpack.packb([[each.number, each.names] for each in collection_log.collections])
    )


def _decode_log(value: RegisterValue | None) -> _CollectionLog | None:
    """Of an agreed value; None where it can't be read."""
    if value is None:
        return _CollectionLog(0, ())
    try:
        above, rows = msgpack.unpackb(value.head)[0], msgpack.unpackb(value.body)
        return decode(_CollectionLog, {"above": above, "collections": [{"number": n, "names": names} for n, names in rows]})
    except (Malformed, ValueError, TypeError, LookupError):
        return None
