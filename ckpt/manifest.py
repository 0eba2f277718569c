"""The manifest: one row for each piece of each leaf, an Arrow table in Parquet. docs/format.md specifies the columns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.shard import Box
from ckpt.storage.errors import IntegrityError


class Row(NamedTuple):
    """A piece: a box of a leaf, and where its bytes are. `pack` is None for a leaf without bytes."""

    leaf: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    pack: str | None
    """Name of the pack below the repository's root; it may belong to an earlier step."""
    position: int
    """Of the block in the pack."""
    stored: int
    """Bytes of the block in the pack."""
    raw: int
    """Bytes of the block before the codec."""
    start: int
    """First byte of the piece in the raw block."""
    nbytes: int
    """Bytes of the piece."""
    codec: str | None
    digest: bytes
    """Of the raw block."""
    checksum: int | None
    """xxh3-64 of the stored bytes, None where those are the raw bytes."""
    cells: bytes
    """xxh3-64 of each 256 KiB cell of the raw block that the piece touches; empty where there is a codec."""


_NAMES = Row._fields[:3] + ("offset", "shape") + Row._fields[4:]


def encode(rows: Sequence[Row], metadata: dict[str, str]) -> bytes:
    """The rows as a Parquet file with `metadata` in its schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(zip(*rows, strict=True)) if rows else [()] * len(Row._fields)
    leaf, dtype, shape, boxes, pack, position, stored, raw, start, nbytes, codec, digest, checksum, cells = columns
    ints = pa.list_(pa.int64())
    text = pa.dictionary(pa.int32(), pa.string())
    table = pa.table(
        {
            "leaf": pa.array(leaf, pa.string()),
            "dtype": pa.array(dtype, pa.string()).cast(text),
            "global_shape": _lists(shape, ints),
            "offset": _lists([b[0] for b in boxes], ints),
            "shape": _lists([b[1] for b in boxes], ints),
            "pack": pa.array(pack, pa.string()).cast(text),
            "position": pa.array(position, pa.int64()),
            "stored": pa.array(stored, pa.int64()),
            "raw": pa.array(raw, pa.int64()),
            "start": pa.array(start, pa.int64()),
            "nbytes": pa.array(nbytes, pa.int64()),
            "codec": pa.array(codec, pa.string()).cast(text),
            "digest": pa.array(digest, pa.binary()),
            "checksum": pa.array(checksum, pa.uint64()),
            "cells": pa.array(cells, pa.binary()),
        }
    ).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=["dtype", "pack", "codec"])
    return sink.getvalue()


def _lists(values: Sequence[Sequence[int]], kind: Any) -> Any:
    """A list column. Built from flat numbers: pyarrow takes nested Python lists one by one, ten times as slowly."""
    import itertools

    import numpy as np
    import pyarrow as pa

    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    flat = np.fromiter(itertools.chain.from_iterable(values), np.int64, offsets[-1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=kind)


@dataclass(slots=True)
class Manifest:
    """The rows of a step and how to find those of a leaf."""

    rows: list[Row]
    digest_algorithm: str
    _by_leaf: dict[str, list[Row]] = field(default_factory=dict)

    def by_leaf(self) -> dict[str, list[Row]]:
        """Rows of each leaf, in the order in which leaves were saved."""
        if not self._by_leaf:
            found = self._by_leaf
            for row in self.rows:
                if (rows := found.get(row.leaf)) is None:
                    found[row.leaf] = [row]
                else:
                    rows.append(row)
        return self._by_leaf


def decode(data: bytes, where: str) -> Manifest:
    """Read a Parquet manifest; raise IntegrityError where it is not one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data), use_threads=False)
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        columns = {name: table.column(name) for name in _NAMES}
        plain: dict[str, Iterable[Any]] = {}
        for name, column in columns.items():
            if name in ("global_shape", "offset", "shape"):
                plain[name] = _tuples(column.combine_chunks())
            else:
                plain[name] = column.to_pylist()
        boxes = map(Box, plain.pop("offset"), plain.pop("shape"))
        plain = {**{n: plain[n] for n in Row._fields[:3]}, "box": boxes, **{n: plain[n] for n in Row._fields[4:]}}
        rows = list(map(Row._make, zip(*plain.values(), strict=True)))
        return Manifest(rows, metadata["digest"])
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise IntegrityError(f"{where} is not a manifest: {error}") from error


def _tuples(column: Any) -> Iterable[tuple[int, ...]]:
    if hasattr(column, "chunks"):  # an empty table
        column = column.chunk(0) if column.num_chunks else column
    if not len(column):
        return []
    flat = column.values.to_numpy(zero_copy_only=False).tolist()
    ends = column.offsets.to_numpy(zero_copy_only=False).tolist()
    return (tuple(flat[a:b]) for a, b in zip(ends, ends[1:], strict=False))
