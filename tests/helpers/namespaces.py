"""Who has which stripes of a file of a namespace."""

from __future__ import annotations

from pathlib import Path

from ckpt.aggregator.file_io.namespace import Namespace


def holders(namespace: Namespace, path: str) -> list[tuple[str, str]]:
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return [(h.member, h.name) for h in file.layout.objects]


def objects(folder: Path) -> list[Path]:
    return [p for p in folder.glob("*/objects/**/*") if p.is_file()]
