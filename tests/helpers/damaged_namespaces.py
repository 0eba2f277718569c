"""Namespaces that are filled with files, checked and damaged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgpack

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import scrub
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.aggregator.records.file_record import FileLayout, FileRecord
from ckpt.storage.registers.base import RegisterValue
from ckpt.storage.testing import random_bytes
from helpers.nodes import directories


def content() -> dict[str, bytes]:
    """Return the files of a filled namespace by path."""
    return {f"d/f{i}": random_bytes(n, i) for i, n in enumerate([0, 100, 40_000, 300_000, 9_000_000])}


def filled_namespace(folder: Path, redundancy: str, count: int = 6) -> Namespace:
    """Return a namespace on `count` disks with the files of `content`."""
    namespace = Namespace(directories(folder, count, redundancy=redundancy))
    for path, data in content().items():
        namespace.put(path, data)
    namespace.settle([f"/{path}" for path in content()])  # put waits only for a majority of the records
    return namespace


def large_file(namespace: Namespace, path: str = "d/f4") -> FileRecord:
    """Return the record of a file that is large enough to have objects."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return file


def assert_whole(namespace: Namespace, redundancy: str) -> None:
    """Check that every file exists with its full redundancy, and that nothing else does."""
    found = scrub.scrub_namespace(namespace, verify=True)
    assert found.is_whole, found
    assert found.files == len(content())
    for path, data in content().items():
        assert namespace.get(path) == data
        file = namespace.stat(path)
        assert file is not None
        if file.layout is not None:
            for stripe in file.layout.stripes:
                members = [file.layout.objects[f.object_index].member for f in stripe.fragments if f is not None]
                assert len(set(members)) == len(members) == parse_redundancy(redundancy).total_fragments


def damage_fragment(layout: FileLayout, index: int, member: str, folder: Path) -> None:
    """Damage the fragment of a stripe that a member has."""
    fragments = [f for f in layout.stripes[index].fragments if f is not None]
    fragment = next(f for f in fragments if layout.objects[f.object_index].member == member)
    with open(folder / "objects" / layout.objects[fragment.object_index].name, "r+b") as file:
        file.seek(fragment.position)
        first = file.read(1)
        file.seek(fragment.position)
        file.write(bytes([first[0] ^ 1]))


def damage_record(folder: Path, path: str) -> None:
    """Damage the record of a path on the member of this folder."""
    with closing(sqlite3.connect(folder / "registers.sqlite")) as db, db:
        assert db.execute("UPDATE registers SET head = x'00ff' WHERE name = ?", (f"/{path}",)).rowcount == 1


def write_newer_record(namespace: Namespace, path: str) -> None:
    """Replace the record of a path by one with another field, as a newer version would write."""
    value = namespace.read_records([f"/{path}"])[f"/{path}"]
    assert value is not None
    newer = RegisterValue(msgpack.packb([*msgpack.unpackb(value.head), "a new field"]), value.body)
    assert namespace.update_record(path, lambda _, current: newer if current == value else None) == newer
    namespace.settle([f"/{path}"])
