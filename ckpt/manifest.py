"""The manifest: one row for each piece of each leaf, an Arrow table in Parquet. docs/format.md specifies the columns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.digest import CELL_BYTES
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


class StoredBlock(NamedTuple):
    """Where a block lies and what proves it; the columns of `Row` that its pieces share."""

    pack: str
    position: int
    stored: int
    raw: int
    codec: str | None
    digest: bytes
    checksum: int | None
    cells: bytes
    """Of all cells of the raw block."""


@dataclass(slots=True)
class Layout:
    """The columns of `Row` that are known before anything is written, and the block of each piece (None: no bytes).

    What Arrow makes of them is kept, since a training loop writes the same columns every time.
    """

    leaf: list[str]
    dtype: list[str]
    global_shape: list[tuple[int, ...]]
    box: list[Box]
    start: list[int]
    nbytes: list[int]
    block: list[int | None]
    _columns: dict[str, Any] = field(default_factory=dict)
    _cells: list[tuple[int, int, int]] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """As Arrow arrays; `block` is the index of each piece's block."""
        import pyarrow as pa

        if not self._columns:
            ints = pa.list_(pa.int64())
            self._columns = {
                "leaf": pa.array(self.leaf, pa.string()),
                "dtype": _text(pa.array(self.dtype, pa.string())),
                "global_shape": _lists(self.global_shape, ints),
                "offset": _lists([b[0] for b in self.box], ints),
                "shape": _lists([b[1] for b in self.box], ints),
                "start": pa.array(self.start, pa.int64()),
                "nbytes": pa.array(self.nbytes, pa.int64()),
                "block": pa.array(self.block, pa.int32()),
            }
        return self._columns

    def cells(self, of_blocks: Sequence[bytes]) -> list[bytes]:
        """The checksums of the cells that each piece touches, out of those of all cells of each block."""
        if not self._cells:
            self._cells = [
                (-1, 0, 0) if i is None else (i, s // CELL_BYTES * 8, -(-(s + n) // CELL_BYTES) * 8)
                for i, s, n in zip(self.block, self.start, self.nbytes, strict=True)
            ]
        known = [*of_blocks, b""]  # the last one for -1
        return [known[i][a:b] for i, a, b in self._cells]


def encode(layout: Layout, blocks: Sequence[StoredBlock], metadata: dict[str, str]) -> bytes:
    """The manifest as a Parquet file with `metadata` in its schema.

    Made column by column: a Python object for each cell of the table would hold up the training step.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = layout.columns()
    of_block = known["block"]
    shared = list(zip(*blocks, strict=True)) if blocks else [()] * 8

    def spread(column: int, kind: Any) -> Any:
        """A column of the blocks as one of the pieces, null where there is no block."""
        return pa.array(shared[column], kind).take(of_block)

    def numbers(column: int) -> Any:
        return spread(column, pa.int64()).fill_null(0)

    columns = {
        **known,
        "pack": _text(spread(0, pa.string())),
        "position": numbers(1),
        "stored": numbers(2),
        "raw": numbers(3),
        "codec": _text(spread(4, pa.string())),
        "digest": spread(5, pa.binary()).fill_null(b""),
        "checksum": spread(6, pa.uint64()),
        "cells": pa.array(layout.cells(shared[7]), pa.binary()),
    }
    table = pa.table({name: columns[name] for name in _NAMES}).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=["dtype", "pack", "codec"])
    return sink.getvalue()


def _text(column: Any) -> Any:
    """Text that repeats, by number."""
    return column.dictionary_encode()


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
        # Not read_table: it starts a thread of Arrow's that rarely aborts the process at exit (apache/arrow#34314).
        table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(use_threads=False)
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        columns = {name: _values(table.column(name)) for name in _NAMES}
        boxes = map(Box._make, zip(columns.pop("offset"), columns.pop("shape"), strict=True))
        ordered = [boxes if name == "box" else columns[name] for name in Row._fields]
        rows = list(map(Row._make, zip(*ordered, strict=True)))
        return Manifest(rows, metadata["digest"])
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise IntegrityError(f"{where} is not a manifest: {error}") from error


def _values(column: Any) -> Iterable[Any]:
    """A column as Python objects. numpy makes them ten times as fast as pyarrow does, where there are no nulls."""
    import pyarrow as pa

    column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    kind = column.type
    if pa.types.is_list(kind):
        flat = column.values.to_numpy(zero_copy_only=False).tolist()
        ends = column.offsets.to_numpy(zero_copy_only=False).tolist()
        return (tuple(flat[a:b]) for a, b in zip(ends, ends[1:], strict=False))
    if pa.types.is_dictionary(kind):
        known = [*column.dictionary.to_pylist(), None]
        codes = column.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False).tolist()
        return [known[code] for code in codes]
    if pa.types.is_integer(kind):
        if column.null_count == len(column):
            return [None] * len(column)
        if not column.null_count:
            return column.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]
