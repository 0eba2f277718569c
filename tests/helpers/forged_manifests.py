"""Manifests and trees of a step that are replaced by others, with matching digests in the commit record."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.format import json_records
from ckpt.format.digest import digest


def replace_file(root: Path, step: int, change: Callable[[Any], Any], suffix: str) -> None:
    """Replace the manifest or the tree of a step by a changed one, and update its digests."""
    path = root / f"steps/{step}/commit.json"
    commit = json_records.decode_commit(path.read_bytes(), "")
    group = commit.manifests if suffix == ".parquet" else commit.trees
    (old,) = group
    data = change((root / old.name).read_bytes())
    (root / old.name).write_bytes(data)
    new = (json_records.StepFile(old.name, len(data), digest("xxh3-128", data).hex()),)
    field = "manifests" if suffix == ".parquet" else "trees"
    path.write_bytes(json_records.encode_commit(dataclasses.replace(commit, **{field: new})))


def change_column(name: str, value: Any) -> Callable[[bytes], bytes]:
    """Return a function that sets a column of the manifest to one value in all rows that have bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def change(data: bytes) -> bytes:
        table = pq.read_table(pa.BufferReader(data))
        at = table.schema.get_field_index(name)
        old = table.column(name).to_pylist()
        packs = table.column("pack").to_pylist()
        new = [value if pack is not None else before for before, pack in zip(old, packs, strict=True)]
        column = pa.array(new, table.schema.field(name).type.value_type).cast(table.schema.field(name).type) if (
            pa.types.is_dictionary(table.schema.field(name).type)
        ) else pa.array(new, table.schema.field(name).type)  # fmt: skip
        sink = io.BytesIO()
        pq.write_table(table.set_column(at, table.schema.field(name), column), sink)
        return sink.getvalue()

    return change
