"""Merges the rows of all ranks into one manifest, and checks that they store every element exactly once.

No Python object is made for a row, so a million rows of ten thousand ranks are merged in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ckpt.errors import StepRefused
from ckpt.format import manifest_parquet
from ckpt.format.row_index import RowIndex, index_rows
from ckpt.groups.base import ranks_text
from ckpt.saving.replica_check import LeafDescription, require_same_description
from ckpt.saving.tiling_check import Flags, Ints, are_tiled, first_overlap, first_uncovered_box
from ckpt.state.boxes import Box, intersect
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa

_REPLICA_HINT = "give each rank another box, or declare replicas: ckpt.Shard(…, replica=(i, n))"
_GAP_HINT = "save a Shard that has it (each i of replica=(i, n))"
_RANKS_GAP_HINT = f"{_GAP_HINT}, and wrap an array that differs by rank in ckpt.Shard"


def merge_rows(
    parts: Sequence[tuple[int, pa.Table]],
    descriptions: Mapping[str, LeafDescription] | None = None,
    left_out: Collection[str] = (),
) -> pa.Table:
    """Return the manifest of a step from the rows of each rank. The result does not depend on the order of `parts`.

    parts: the number and the rows of each rank.
    descriptions: dtype and shape of leaves of which a rank may have stored nothing.
    left_out: leaves that the step does not list.

    The rows of a leaf are adjacent, in the order of the ranks. The leaves are in the order of the lowest rank that has them.
    Rows of boxes without elements are left out, as are rows of a box that a lower rank has stored with the same bytes.

    Raises StepRefused if dtypes, shapes or digest algorithms of ranks differ, if a box was stored twice, or if one is missing.
    """
    import pyarrow as pa

    parts = sorted(parts, key=lambda part: part[0])
    _check_digests(parts)
    table = _concatenated([table for _, table in parts])
    ranks = np.repeat([rank for rank, _ in parts], [len(table) for _, table in parts])
    index = index_rows([table.column("leaf")])
    keep = _Rows(table, ranks, index).select_rows(descriptions or {}, left_out)
    if index.row_order is not None:
        keep = index.row_order[keep]
    if len(keep) < len(table) or index.row_order is not None:
        table = pa.table(
            {name: arrow_columns.take_rows(arrow_columns.one_chunk(table.column(name)), keep) for name in table.column_names}
        )
    return table.replace_schema_metadata(parts[0][1].schema.metadata if parts else None)


def _check_digests(parts: Sequence[tuple[int, pa.Table]]) -> None:
    """Raise StepRefused if two ranks have used different digest algorithms."""
    rank_by_algorithm: dict[bytes, int] = {}
    for rank, table in parts:
        rank_by_algorithm.setdefault((table.schema.metadata or {}).get(b"digest", b"?"), rank)
    if len(rank_by_algorithm) > 1:
        (a, rank_a), (b, rank_b), *_ = rank_by_algorithm.items()
        raise StepRefused(
            f"rank {rank_a} saved with digest={a.decode()!r}, rank {rank_b} with digest={b.decode()!r}; use one on all ranks"
        )


def _concatenated(parts: list[pa.Table]) -> pa.Table:
    """Return all rows as one table, with each column in one chunk."""
    import pyarrow as pa

    plain = [part.replace_schema_metadata(None) for part in parts] or [manifest_parquet.empty_table(manifest_parquet.COLUMNS)]
    if len({part.schema for part in plain}) > 1:  # some have dictionary-encoded text or differences, and others do not
        with_bases = any("base_pack" in part.column_names for part in plain)
        plain = [manifest_parquet.as_plain_table(part, with_bases) for part in plain]
    return pa.concat_tables(plain).combine_chunks()


class _Rows:
    """The rows in the order of the manifest, and their boxes as numbers."""

    def __init__(self, table: pa.Table, ranks: Ints, index: RowIndex) -> None:
        order = index.row_order

        def sort(column: arrow_columns.Column) -> pa.Array:
            column = arrow_columns.one_chunk(column)
            return column if order is None else arrow_columns.take_rows(column, order)

        self.names = list(index.leaf_numbers)
        self.starts: Ints = np.asarray(index.leaf_starts, np.int64)
        self.first = self.starts[:-1]
        self.leaf = np.repeat(np.arange(len(self.names)), np.diff(self.starts))
        self.ranks = ranks if order is None else ranks[order]
        self.dtype, self.dtypes = arrow_columns.dictionary_codes(sort(table.column("dtype")))
        (self.whole, self.at), (self.offset, self.offset_starts), (self.shape, self.shape_starts) = (
            arrow_columns.flat_lists(sort(table.column(name))) for name in manifest_parquet.LIST_COLUMNS
        )
        self.byte_columns = [sort(table.column(name)) for name in ("digest", "start", "nbytes")]

    def select_rows(self, descriptions: Mapping[str, LeafDescription], left_out: Collection[str]) -> Ints:
        """Return the indices of the rows for the manifest; raise StepRefused if they do not cover the leaves exactly."""
        self._check_dtypes_and_shapes()
        self._check_descriptions(descriptions)
        self._check_bounds()
        keep = self._nonempty_rows()
        tiled_leaves = self._is_tiled(np.arange(len(self.names)), keep)
        if not np.all(tiled_leaves):
            suspects = np.flatnonzero(~tiled_leaves)
            keep = self._without_copies(suspects, keep)
            suspects = suspects[~self._is_tiled(suspects, keep)]
            if len(suspects):
                raise self._diagnose(int(suspects[0]), keep)
        if left_out:
            keep = keep & ~np.array([name in left_out for name in self.names], bool)[self.leaf]
        return np.flatnonzero(keep)

    # --- dtypes, shapes and bounds ------------------------------------------------------------------------------

    def _check_dtypes_and_shapes(self) -> None:
        axes = np.diff(self.at)
        differs = (self.dtype != self.dtype[self.first][self.leaf]) | (axes != axes[self.first][self.leaf])
        for count in arrow_columns.distinct(axes):
            rows = np.flatnonzero((axes == count) & ~differs)
            own = _matrix(self.whole, self.at[rows], count)
            first = _matrix(self.whole, self.at[self.first[self.leaf[rows]]], count)
            differs[rows[np.any(own != first, axis=1)]] = True
        if np.any(differs):
            row = int(np.argmax(differs))
            require_same_description(
                self._name(row), self._description(int(self.first[self.leaf[row]])), self._description(row)
            )

    def _check_descriptions(self, descriptions: Mapping[str, LeafDescription]) -> None:
        number = {name: i for i, name in enumerate(self.names)}
        for name, described in descriptions.items():
            if (leaf := number.get(name)) is not None:
                require_same_description(name, self._description(int(self.first[leaf])), described)

    def _check_bounds(self) -> None:
        invalid = (np.diff(self.offset_starts) != np.diff(self.at)) | (np.diff(self.shape_starts) != np.diff(self.at))
        if not np.any(invalid):
            outside = (self.offset < 0) | (self.shape < 0) | (self.shape > self.whole - self.offset)
            invalid[_row_of(self.at, np.flatnonzero(outside))] = True
        if np.any(invalid):
            row = int(np.argmax(invalid))
            raise StepRefused(
                f"leaf {self._name(row)}: {_slice_text(self._box(row))} of rank {self.ranks[row]} does not lie within shape "
                f"{self._shape(row)}; check offset and global_shape of its ckpt.Shard"
            )

    def _nonempty_rows(self) -> Flags:
        """Select all rows except those of empty boxes; a leaf without elements keeps one row."""
        keep = np.ones(len(self.leaf), bool)
        keep[_row_of(self.at, np.flatnonzero(self.shape == 0))] = False
        empty_leaves = self.leaf[_row_of(self.at, np.flatnonzero(self.whole == 0))]
        keep[self.first[empty_leaves]] = True
        return keep

    # --- boxes ---------------------------------------------------------------------------------------------------

    def _is_tiled(self, leaves: Ints, keep: Flags) -> Flags:
        """Return which of the leaves the kept rows cover exactly."""
        kept = np.concatenate([[0], np.cumsum(keep)])
        counts = (kept[self.starts[1:]] - kept[self.starts[:-1]])[leaves]
        axes = np.diff(self.at)[self.first[leaves]]
        done = np.ones(len(leaves), bool)
        of_leaf = np.full(len(self.names), -1)
        for count in arrow_columns.distinct(axes):
            mine = np.flatnonzero(axes == count)
            of_leaf[:] = -1
            of_leaf[leaves[mine]] = mine
            rows = np.flatnonzero(keep & (of_leaf[self.leaf] >= 0))
            shapes = _matrix(self.whole, self.at[self.first[leaves[mine]]], count)
            starts = np.concatenate([[0], np.cumsum(counts[mine])])
            boxes = (_matrix(values, self.at[rows], count) for values in (self.offset, self.shape))
            done[mine] = are_tiled(shapes, starts, *boxes) | np.any(shapes == 0, axis=1)
        return done

    def _without_copies(self, leaves: Ints, keep: Flags) -> Flags:
        """Deselect rows of a box that an earlier row has; raise StepRefused if their bytes may differ."""
        keep = keep.copy()
        suspect = np.zeros(len(self.names), bool)
        suspect[leaves] = True
        axes = np.diff(self.at)
        rows = np.flatnonzero(keep & suspect[self.leaf])
        for count in arrow_columns.distinct(axes[rows]):
            mine = rows[axes[rows] == count]
            boxes = [_matrix(values, self.at[mine], count) for values in (self.offset, self.shape)]
            keys = [self.leaf[mine], *boxes[0].T, *boxes[1].T]
            order = np.lexsort(keys[::-1])  # stable, so the lowest rank comes first
            mine = mine[order]
            same = np.all([key[order][1:] == key[order][:-1] for key in keys], axis=0)
            head = np.concatenate([[True], ~same])
            copies = np.flatnonzero(~head)
            first = mine[np.flatnonzero(head)[np.cumsum(head) - 1]][copies]
            copy = mine[copies]
            equal = self._has_same_bytes(first, copy)
            if not np.all(equal):
                at = int(np.argmin(equal))
                a, b = int(first[at]), int(copy[at])
                raise StepRefused(
                    f"leaf {self._name(a)}: ranks {self.ranks[a]} and {self.ranks[b]} both stored {_slice_text(self._box(a))} "
                    f"of shape {self._shape(a)}, an overlap whose bytes may differ; {_REPLICA_HINT}"
                )
            keep[copy] = False
        return keep

    def _has_same_bytes(self, a: Ints, b: Ints) -> Flags:
        equal = np.ones(len(a), bool)
        for column in self.byte_columns:
            equal &= arrow_columns.bool_array(
                arrow_columns.compute_function("equal", arrow_columns.take_rows(column, a), arrow_columns.take_rows(column, b))
            )
        return equal

    def _diagnose(self, leaf: int, keep: Flags) -> StepRefused:
        """Return the error for a leaf that is not covered exactly: the first overlap or the first gap."""
        rows = np.flatnonzero(keep[self.starts[leaf] : self.starts[leaf + 1]]) + self.starts[leaf]
        shape = self._shape(int(self.starts[leaf]))
        offset, extent = (_matrix(values, self.at[rows], len(shape)) for values in (self.offset, self.shape))
        name = self.names[leaf]
        pair = first_overlap(offset, extent)
        if pair is not None:
            a, b = (int(rows[i]) for i in pair)
            common = intersect(self._box(a), self._box(b))
            return StepRefused(
                f"leaf {name}: {_slice_text(self._box(a))} of rank {self.ranks[a]} and {_slice_text(self._box(b))} of rank "
                f"{self.ranks[b]} overlap in {_slice_text(common)} of shape {shape}; {_REPLICA_HINT}"
            )
        gap = first_uncovered_box(shape, offset, extent)
        assert gap is not None
        begin = np.array(gap.offset, np.int64)
        adjacent = rows[np.all((offset <= begin + gap.shape) & (offset + extent >= begin), axis=1)]
        adjacent_text = (
            f", {ranks_text(np.unique(self.ranks[adjacent]).tolist())} stored what lies beside it" if len(adjacent) else ""
        )
        hint = _GAP_HINT if (self.ranks == self.ranks[0]).all() else _RANKS_GAP_HINT
        return StepRefused(f"leaf {name}: no rank stored {_slice_text(gap)} of shape {shape}{adjacent_text}; {hint}")

    # --- for messages --------------------------------------------------------------------------------------------

    def _name(self, row: int) -> str:
        return self.names[int(self.leaf[row])]

    def _shape(self, row: int) -> tuple[int, ...]:
        return tuple(self.whole[self.at[row] : self.at[row + 1]].tolist())

    def _box(self, row: int) -> Box:
        return Box(
            tuple(self.offset[self.offset_starts[row] : self.offset_starts[row + 1]].tolist()),
            tuple(self.shape[self.shape_starts[row] : self.shape_starts[row + 1]].tolist()),
        )

    def _description(self, row: int) -> LeafDescription:
        return LeafDescription(int(self.ranks[row]), self.dtypes[int(self.dtype[row])], self._shape(row))


def _matrix(flat: Ints, begins: Ints, count: int) -> Ints:
    """Return `count` numbers from each begin on, as rows."""
    matrix: Ints = flat[begins[:, None] + np.arange(count)]
    return matrix


def _row_of(begins: Ints, positions: Ints) -> Ints:
    """Return the rows to which positions in the flattened numbers belong."""
    rows: Ints = np.searchsorted(begins, positions, "right") - 1
    return rows


def _slice_text(box: Box | None) -> str:
    """Return a box as the text of a slice: [0:4, 16:32]."""
    assert box is not None
    ranges = zip(box.offset, box.shape, strict=False)
    return "[" + ", ".join(f"{begin}:{begin + length}" for begin, length in ranges) + "]"
