"""Build and encode the manifest of a step from the columns of its block plan and the locations of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.format import manifest_parquet
from ckpt.format.block_difference import BaseBlock
from ckpt.format.digest import CELL_BYTES
from ckpt.format.manifest_parquet import write_table
from ckpt.state.boxes import Box
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa


class StoredBlock(NamedTuple):
    """The location, encoding and digests of a block: the columns of `manifest.Row` that all pieces of the block share."""

    pack: str
    position: int
    stored: int
    raw: int
    codec: str | None
    digest: bytes
    checksum: int | None
    cells: bytes
    """xxh3-64 of each cell of the raw block; empty with a codec."""
    base: BaseBlock | None = None
    """The base block if this is a difference."""


@dataclass(slots=True)
class PlannedColumns:
    """The columns of `manifest.Row` that a block plan determines, and the index of the block of each piece (None: no bytes).

    Their Arrow arrays are cached, since a training loop writes the same columns in each save.
    """

    leaf: list[str]
    dtype: list[str]
    global_shape: list[tuple[int, ...]]
    box: list[Box]
    start: list[int]
    nbytes: list[int]
    block: list[int | None]
    _arrow_columns: dict[str, pa.Array] = field(default_factory=dict)
    _cell_ranges: list[tuple[int, int, int]] = field(default_factory=list)

    def arrow_columns(self) -> dict[str, pa.Array]:
        """Return the columns as Arrow arrays; `block` is the index of each piece's block counted from 1, 0 for none."""
        if not self._arrow_columns:
            self._arrow_columns = {
                "leaf": arrow_columns.text_array(self.leaf),
                "dtype": arrow_columns.dictionary_encoded(arrow_columns.text_array(self.dtype)),
                "global_shape": arrow_columns.list_array(self.global_shape),
                "offset": arrow_columns.list_array([b[0] for b in self.box]),
                "shape": arrow_columns.list_array([b[1] for b in self.box]),
                "start": arrow_columns.number_array(self.start),
                "nbytes": arrow_columns.number_array(self.nbytes),
                "block": arrow_columns.number_array([0 if i is None else i + 1 for i in self.block]),
            }
        return self._arrow_columns

    def cells_of_pieces(self, of_blocks: Sequence[bytes]) -> list[bytes]:
        """Return the checksums of the cells that each piece touches.

        of_blocks: for each block the checksums of all its cells, 8 bytes each.
        """
        if not self._cell_ranges:
            self._cell_ranges = [
                (-1, 0, 0) if i is None else (i, s // CELL_BYTES * 8, -(-(s + n) // CELL_BYTES) * 8)
                for i, s, n in zip(self.block, self.start, self.nbytes, strict=True)
            ]
        with_none = [*of_blocks, b""]  # index -1 is a piece without a block
        return [with_none[i][a:b] for i, a, b in self._cell_ranges]


def import_parquet() -> None:
    """Import the modules that writing a manifest needs."""
    import pyarrow._compute  # not pyarrow.compute: see arrow_columns.compute_function
    import pyarrow.parquet  # noqa: F401


def encode(columns: PlannedColumns, blocks: Sequence[StoredBlock], metadata: dict[str, str]) -> bytes:
    """Return the manifest as a Parquet file with `metadata` in its schema."""
    return write_table(build_table(columns, blocks), metadata)


def build_table(planned: PlannedColumns, blocks: Sequence[StoredBlock]) -> pa.Table:
    """Return the rows as an Arrow table.

    The table is built by columns: making a Python object for each of its values would delay the training step.
    """
    import pyarrow as pa

    planned_columns = planned.arrow_columns()
    of_block = planned_columns["block"]
    values: Iterable[Sequence[Any]] = zip(*blocks, strict=True) if blocks else [()] * len(StoredBlock._fields)
    block_values = dict(zip(StoredBlock._fields, values, strict=True))

    def spread(field_name: str, kind: Callable[[Sequence[Any]], pa.Array], missing: object = None) -> pa.Array:
        """Return a field of `blocks` with one value for each piece; missing: the value for pieces without a block."""
        return arrow_columns.compute_function("take", kind([missing, *block_values[field_name]]), of_block)

    def numbers(field_name: str) -> pa.Array:
        return spread(field_name, arrow_columns.number_array, 0)

    columns = {
        **planned_columns,
        "pack": arrow_columns.dictionary_encoded(spread("pack", arrow_columns.text_array)),
        "position": numbers("position"),
        "stored": numbers("stored"),
        "raw": numbers("raw"),
        "codec": arrow_columns.dictionary_encoded(spread("codec", arrow_columns.text_array)),
        "digest": spread("digest", arrow_columns.binary_array, b""),
        "checksum": spread("checksum", lambda values: arrow_columns.number_array(values, "uint64")),
        "cells": arrow_columns.binary_array(planned.cells_of_pieces(block_values["cells"])),
    }
    if not any(block_values["base"]):
        return pa.table({name: columns[name] for name in manifest_parquet.COLUMNS})
    columns.update(_base_columns(block_values["base"], of_block))
    return pa.table({name: columns[name] for name in manifest_parquet.COLUMNS + manifest_parquet.BASE_COLUMNS})


def _base_columns(bases: Sequence[BaseBlock | None], of_block: pa.Array) -> dict[str, pa.Array]:
    """Return the columns of the bases of blocks. of_block: the index of each piece's block counted from 1, 0 for none."""
    values = zip(
        *((None,) * len(manifest_parquet.BASE_COLUMNS) if base is None else base for base in (None, *bases)), strict=True
    )
    numbers: Callable[[Sequence[Any]], pa.Array] = arrow_columns.number_array
    make: dict[str, Callable[[Sequence[Any]], pa.Array]] = {
        "base_pack": arrow_columns.text_array,
        "base_codec": arrow_columns.text_array,
        "base_digest": arrow_columns.binary_array,
        "base_checksum": lambda column: arrow_columns.number_array(column, "uint64"),
    }
    made = {}
    for name, column in zip(manifest_parquet.BASE_COLUMNS, values, strict=True):
        made[name] = arrow_columns.compute_function("take", make.get(name, numbers)(column), of_block)
        if name in manifest_parquet.TEXT_COLUMNS:
            made[name] = arrow_columns.dictionary_encoded(made[name])
    return made
