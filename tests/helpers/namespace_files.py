"""Files of a namespace, their fragments and their objects."""

from __future__ import annotations

from pathlib import Path

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.testing import random_bytes

OLD, NEW = random_bytes(70_000, 1), random_bytes(9_000_000, 2)


def member_objects(namespace: Namespace, path: str) -> list[tuple[str, str]]:
    """Return the member and the name of each object of a file."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return [(h.member, h.name) for h in file.layout.objects]


def objects(folder: Path) -> list[Path]:
    """Return the objects on all disks below a folder."""
    return [p for p in folder.glob("*/objects/**/*") if p.is_file()]


def fragment_counts(namespace: Namespace, path: str) -> set[int]:
    """Return the numbers of fragments that stripes of a file have."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return {sum(f is not None for f in stripe.fragments) for stripe in file.layout.stripes}
