"""A namespace of which three members have the replicas of the records."""

from __future__ import annotations

from pathlib import Path

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.testing import random_bytes
from helpers.nodes import directories

CONTENT = {f"d/f{i}": random_bytes(n, i) for i, n in enumerate([0, 100, 40_000, 300_000, 2_000_000])} | {
    f"many/{i}": b"%d" % i for i in range(60)
}


def make_three_member_namespace(folder: Path, count: int, **table: object) -> None:
    """Make a namespace on the first three directories, with files; a test adds more directories."""
    namespace = Namespace(directories(folder, 3, **table))
    for path, data in CONTENT.items():
        namespace.put(path, data)
    namespace.delete(["many/0"])
    namespace.close()


def locations_of(namespace: Namespace, *numbers: int) -> list[object]:
    """Return the locations of the members with these numbers."""
    return [namespace.open_members[f"disk{i}"].member.location for i in numbers]


def record_members(namespace: Namespace) -> set[str]:
    """Return the members that keep records."""
    return set(namespace.ring.all_members)


def assert_all_files_exist(namespace: Namespace) -> None:
    """Check that the namespace has exactly its files."""
    assert sorted(namespace.list()) == sorted(set(CONTENT) - {"many/0"})
    for path, data in CONTENT.items():
        if path != "many/0":
            assert namespace.get(path) == data
    assert namespace.stat("many/0") is None


def kill_at(point: str) -> str:
    """Return the fail point that kills the process at `point`, or at its n-th pass with `@n`."""
    name, _, number = point.partition("@")
    return f"{name}=kill@{number or 1}"
