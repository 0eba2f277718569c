"""The objects of the files of a namespace."""

from __future__ import annotations

from pathlib import Path

from ckpt.aggregator.file_io.namespace import Namespace


def member_objects(namespace: Namespace, path: str) -> list[tuple[str, str]]:
    """Return the member and the name of each object of a file."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return [(h.member, h.name) for h in file.layout.objects]


def objects(folder: Path) -> list[Path]:
    """Return the objects on all disks below a folder."""
    return [p for p in folder.glob("*/objects/**/*") if p.is_file()]
