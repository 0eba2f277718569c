"""The small objects of a rendezvous: reading, writing and listing them at the store, and packing the data of a gather."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt.errors import GroupError
from ckpt.storage.base.checked_decode import Malformed, read_json
from ckpt.storage.base.errors import IntegrityError, NotFound
from ckpt.storage.base.store import Store
from ckpt.storage.base.threads import DaemonThreadPool

log = logging.getLogger("ckpt")

MAX_MARKER_BYTES = 4 << 20
"""The most bytes of an object that is not data of a gather: the tokens of two hundred thousand ranks."""


def list_markers(store: Store, folder: str, marker: str) -> dict[int, list[str]]:
    """Return the ranks that have put this marker, each with the tokens in its names. marker: "hello", "gone" or "bye"."""
    found: dict[int, list[str]] = {}
    for entry in store.list(folder):
        kind, *rest = entry.name.rpartition("/")[2].split("-")
        if kind == marker:
            found.setdefault(int(rest[0]), []).extend(rest[1:])
    return found


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """Return parts of any length as one object, each after its length in 8 bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def unpack_parts(packed: bytes) -> list[bytes]:
    """Return the parts that `pack_parts` joined."""
    parts, position = [], 0
    while position < len(packed):
        begin = position + 8
        position = begin + int.from_bytes(packed[position:begin], "little")
        parts.append(packed[begin:position])
    return parts


def get_objects(store: Store, names: Sequence[str], limit: int) -> list[bytes | None]:
    """Return many small objects, read by several threads: with a thousand ranks at a bucket, one thread takes far too long."""
    with DaemonThreadPool(min(16, len(names) or 1), "ckpt-rendezvous") as pool:
        return list(pool.map(lambda name: get_object(store, name, limit), names))


def get_object(store: Store, name: str, limit: int = MAX_MARKER_BYTES) -> bytes | None:
    """Return an object; None if it does not exist, and b"" for a marker that is too long.

    Raises GroupError if data of a gather are too long.
    """
    try:
        return store.get_up_to(name, limit)
    except NotFound:
        return None
    except IntegrityError as error:
        if limit > MAX_MARKER_BYTES:
            raise GroupError(f"the data of a gather cannot be read: {error}") from error
        log.warning("%s", error)
        return b""


def member_tokens(data: bytes | None, size: int) -> list[object] | None:
    """Return the tokens in members.json, in the order of ranks; None while it does not exist."""
    if data is None:
        return None
    try:
        found = read_json(data)
    except Malformed:
        found = None
    return found if isinstance(found, list) and len(found) == size else [None] * size


def put_object(store: Store, name: str, data: bytes) -> None:
    """Put an object, repeatedly after NotFound.

    NotFound means that the rank that prepares the repository deleted our temporary file, as that of a killed writer, or that
    another rank deleted the folder, which was just empty.
    """
    for _ in range(20):
        try:
            store.put(name, data)
            return
        except NotFound:
            continue
    store.put(name, data)
