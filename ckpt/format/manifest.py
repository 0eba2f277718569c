"""The manifest of a step: a table with one row for each piece (stored box) of each leaf.

docs/reference/format.md specifies the columns. A step of ten thousand ranks has a million rows, of which a rank needs about a
hundred: Python objects are made for those rows only.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpt.errors import DAMAGE_ADVICE
from ckpt.format import manifest_parquet
from ckpt.format.digest import is_cryptographic
from ckpt.format.dtype_text import plain_dtype
from ckpt.format.json_records import require_known_format
from ckpt.format.limits import MAX_BLOCK_BYTES
from ckpt.format.manifest_parquet import RowGroup, read_table, write_table
from ckpt.format.manifest_rows import BlockLocation, Row, locations_of_table, rows_of_table
from ckpt.format.row_index import Integers, RowIndex, index_rows
from ckpt.state.boxes import Box
from ckpt.state.dtype_names import numpy_dtype
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "BlockLocation",
    "Manifest",
    "Row",
    "Saved",
    "decode",
    "read_table",
    "write_table",
]  # fmt: skip


class Saved(NamedTuple):
    """The dtype and global shape of one saved array."""

    dtype: str
    shape: tuple[int, ...]


class LeafTotal(NamedTuple):
    """The sums over the rows of one leaf."""

    name: str
    first: Row
    """The first row of the leaf."""
    nbytes: int
    """Raw bytes of the leaf."""
    stored_bytes: float
    """The share of the leaf in the bytes of the packs, with those of the bases of its differences."""


def decode(data: bytes, where: str) -> Manifest:
    """Open a Parquet manifest; raise IntegrityError if it is not one. where: the file, for messages."""
    groups, metadata = manifest_parquet.read_row_groups(data, where)
    for name in ("format", "digest"):
        if name not in metadata:
            raise IntegrityError(f"{where} is not a manifest: its metadata lack {name}; {DAMAGE_ADVICE}")
    version = metadata["format"]
    require_known_format(int(version) if version.isdecimal() else version, where, manifest_parquet.FORMAT_WITH_BASES)
    if is_cryptographic(metadata["digest"]) and any(group.has_bases for group in groups):
        raise IntegrityError(
            f"{where} has differences, whose stored bytes no {metadata['digest']} digest covers; {DAMAGE_ADVICE}"
        )
    return Manifest(groups, metadata["digest"], where)


def join_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Return several manifests as one."""
    if len(manifests) == 1:
        return manifests[0]
    groups = [group for m in manifests for group in m.groups]
    return Manifest(groups, manifests[-1].digest_algorithm if manifests else "xxh3-128", "the manifests")


class Manifest:
    """The rows of a step. It answers which leaves a step has, and where a box of a leaf is stored.

    A query by leaf reads the column of leaf names for all rows, and other columns from the row groups that have its leaves.
    Several threads may use one manifest. `_leaves`, `_leaf_bytes` and `_row_index` are computed at their first use without a
    lock: two threads may compute the same value twice.
    """

    def __init__(self, groups: Sequence[RowGroup], digest_algorithm: str, where: str) -> None:
        self.groups = groups
        self.digest_algorithm = digest_algorithm
        self.where = where
        self._has_bases = any(group.has_bases for group in groups)
        self._base_columns = manifest_parquet.BASE_COLUMNS if self._has_bases else ()
        self._columns = manifest_parquet.COLUMNS + self._base_columns
        """The columns of a row. Those of bases are read only where a block is a difference."""
        self._starts = np.cumsum([0, *(group.row_count for group in groups)])
        self._lock = threading.Lock()
        """Guards `_recent_reads`, and the Parquet file, which one thread at a time may read."""
        self._recent_reads: dict[tuple[int, Sequence[str]], pa.Table] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    # --- leaves ------------------------------------------------------------------------------------------------

    def leaves(self) -> dict[str, Saved]:
        """Return dtype and shape of each leaf, in the order in which they were saved."""
        if self._leaves is None:
            index = self._index()
            first = self._take(index.first_rows(), ("dtype", "global_shape"))
            dtypes, shapes = (arrow_columns.python_values(first.column(name)) for name in ("dtype", "global_shape"))
            plain = {dtype: plain_dtype(dtype) for dtype in set(dtypes)}
            saved = (Saved(plain[dtype], shape) for dtype, shape in zip(dtypes, shapes, strict=True))
            self._leaves = dict(zip(index.leaf_numbers, saved, strict=True))
        return self._leaves

    _leaves: dict[str, Saved] | None = None

    def totals(self) -> list[LeafTotal]:
        """Return the totals of each leaf, in the order in which they were saved."""
        index = self._index()
        names = ("stored", "raw", "nbytes")
        table = self._take(index.row_order, (*names, *self._base_columns))
        stored, raw, nbytes = (arrow_columns.numpy_array(table.column(n)) for n in names)
        if self._has_bases:
            stored = stored + arrow_columns.numbers_or_zero(table.column("base_stored"))
        share = stored * (nbytes / np.maximum(raw, 1))
        sums = (np.add.reduceat(values, index.leaf_starts[:-1]).tolist() if len(raw) else [] for values in (nbytes, share))
        first = rows_of_table(self._take(index.first_rows(), self._columns), self.where)
        return list(map(LeafTotal._make, zip(index.leaf_numbers, first, *sums, strict=True)))

    def bytes_of_leaves(self) -> dict[str, float]:
        """Return the bytes of all pieces of each leaf, as floats, since sums of forged numbers must not overflow.

        Raises IntegrityError if a piece states more bytes than its block has, or a block more than the maximum.
        """
        if self._leaf_bytes is None:
            index = self._index()
            names = ("position", "stored", "raw", "start", "nbytes", "codec")
            table = self._take(index.row_order, (*names, *self._base_columns))
            self._check_lengths(table)
            nbytes = arrow_columns.numpy_array(table.column("nbytes")).astype(np.float64)
            sums = np.add.reduceat(nbytes, index.leaf_starts[:-1]).tolist() if len(nbytes) else []
            self._leaf_bytes = dict(zip(index.leaf_numbers, sums, strict=True))
        return self._leaf_bytes

    _leaf_bytes: dict[str, float] | None = None

    def require_whole_leaves(self, where: str) -> None:
        """Raise IntegrityError if the pieces of a leaf have another number of bytes than its shape needs. where: the step."""
        stored = self.bytes_of_leaves()
        for name, (dtype, shape) in self.leaves().items():
            try:
                require_whole_leaf(dtype, shape, stored[name])
            except CkptError as error:
                raise type(error)(f"leaf {name} of {where}: {error}") from error

    # --- rows --------------------------------------------------------------------------------------------------

    def find(self, queries: Sequence[tuple[str, Box | None]]) -> list[list[Row]]:
        """Return for each query the rows with elements in its box, in stored order.

        queries: a leaf, and a box of it or None for all rows. A leaf that the manifest does not have gets no rows.

        Raises IntegrityError if a found row is not a box of its array.
        """
        index = self._index()
        names, boxes = [name for name, _ in queries], [box for _, box in queries]
        which, numbers = index.rows_of(names)
        if boxes.count(None) < len(boxes):
            which, numbers = self._rows_touching(which, numbers, boxes)
        table = self._take(numbers, self._columns)
        self._check_boxes(table)
        rows = rows_of_table(table, self.where)
        cuts = [0, *np.cumsum(np.bincount(which, minlength=len(queries))).tolist()]
        return [rows[a:b] for a, b in itertools.pairwise(cuts)]

    def select(self, leaves: Iterable[str]) -> Manifest:
        """Return the rows of these leaves as a manifest in memory; leaves that the step does not have are ignored."""
        _, rows = self._index().rows_of(list(set(leaves)))
        table = self._take(np.sort(rows), self._columns)
        return Manifest([manifest_parquet.row_group_of(table, self.where)], self.digest_algorithm, self.where)

    @property
    def rows(self) -> list[Row]:
        """All rows as Python objects; slow and large for a step of many ranks."""
        tables_read = (self._read(number, self._columns) for number in range(len(self.groups)))
        return [row for table in tables_read for row in rows_of_table(table, self.where)]

    def by_leaf(self) -> dict[str, list[Row]]:
        """Return all rows by leaf, in the order in which leaves were saved."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.leaf, []).append(row)
        return found

    # --- blocks ------------------------------------------------------------------------------------------------

    def blocks(self, rank: int | None = None) -> dict[tuple[bytes, int], BlockLocation]:
        """Return the location of each block, by digest and raw length. rank: only blocks in packs that this rank wrote."""
        names = ("digest", "raw", "pack", "position", "stored", "codec", "checksum", *self._base_columns)
        found: dict[tuple[bytes, int], BlockLocation] = {}
        for number in range(len(self.groups)):
            mine = _rows_of_rank(self._read(number, ("pack",)).column("pack"), rank)
            if len(mine):
                table = arrow_columns.take_rows(self._read(number, names).select(names), mine)
                keys = zip(*(arrow_columns.python_values(table.column(name)) for name in names[:2]), strict=True)
                found.update(zip(keys, locations_of_table(table, self.where), strict=True))
        return found

    def block_positions(self, rank: int | None = None) -> Iterator[tuple[tuple[str, tuple[int, ...], int], tuple[bytes, int]]]:
        """Yield what each block contains, and its digest and raw length. rank: only blocks in packs that this rank wrote.

        What it contains is given by the leaf and the offset of its first piece, and by its raw length.
        """
        names = ("leaf", "offset", "raw", "digest", "raw")
        for number in range(len(self.groups)):
            head = self._read(number, ("pack", "start"))
            mine = _rows_of_rank(head.column("pack"), rank)
            mine = mine[arrow_columns.numpy_array(head.column("start"))[mine] == 0]
            if len(mine):
                table = arrow_columns.take_rows(self._read(number, names[:4]).select(names[:4]), mine)
                columns = [arrow_columns.python_values(table.column(name)) for name in names]
                yield from zip(zip(*columns[:3], strict=True), zip(*columns[3:], strict=True), strict=True)

    def in_pack_order(self, at_once: int = 1 << 16) -> Iterator[list[Row]]:
        """Yield all rows that have bytes in the order of their packs, in lists of about `at_once` rows.

        All rows of a block are in the same list.
        """
        order, blocks = self._block_order()
        cuts = np.unique(blocks[np.searchsorted(blocks, np.arange(0, len(order), at_once), "right") - 1])
        for a, b in itertools.pairwise([*cuts.tolist(), len(order)]):
            yield rows_of_table(self._take(order[a:b], self._columns), self.where)

    def by_block(self) -> list[Row]:
        """Return one row of each block that the step needs, in the order of the packs; bases of differences are included."""
        order, blocks = self._block_order()
        rows = rows_of_table(self._take(order[blocks], self._columns), self.where)
        bases = {(base.pack, base.position): base for row in rows if (base := row.base_row()) is not None}
        if not bases:
            return rows
        found = {**bases, **{(row.pack, row.position): row for row in rows}}
        return [found[key] for key in sorted(found)]

    def stored_bytes(self) -> int:
        """Return the stored bytes of all blocks and of the bases of differences, each block counted once."""
        if self._has_bases:
            return sum(row.stored for row in self.by_block())
        order, blocks = self._block_order()
        return int(np.sum(arrow_columns.numpy_array(self._take(order[blocks], ("stored",)).column("stored"))))

    def _block_order(self) -> tuple[Integers, Integers]:
        """Return the numbers of the rows that have bytes, in pack order, and the index there of each block's first row."""
        table = self._take(None, ("pack", "position"))
        pack = arrow_columns.one_chunk(table.column("pack"))
        rows = arrow_columns.valid_rows(pack)
        codes, names = arrow_columns.dictionary_codes(arrow_columns.take_rows(pack, rows))
        rank = np.argsort(np.argsort(np.array(names, object), kind="stable")) if names else np.zeros(0, np.int64)
        pack, position = rank[codes], arrow_columns.numpy_array(table.column("position"))[rows]
        order = np.lexsort((position, pack))
        pack, position = pack[order], position[order]
        new = (pack[1:] != pack[:-1]) | (position[1:] != position[:-1])
        return rows[order], np.flatnonzero(np.append(np.ones(min(1, len(rows)), bool), new))

    # --- reading -----------------------------------------------------------------------------------------------

    def _index(self) -> RowIndex:
        if self._row_index is None:
            self._row_index = index_rows(self._read(number, ("leaf",)).column("leaf") for number in range(len(self.groups)))
        return self._row_index

    _row_index: RowIndex | None = None

    def _read(self, group: int, names: Sequence[str]) -> pa.Table:
        """Return columns of a row group. The last few are cached, since a reader queries its arrays one after the other."""
        with self._lock:
            if len(self.groups) == 1:
                names = self._columns  # one read of all columns is faster than two reads of some
            table = self._recent_reads.pop((group, names), None)
            if table is None:
                table = self.groups[group].read(names)
                while len(self._recent_reads) >= _MAX_RECENT_READS:
                    del self._recent_reads[next(iter(self._recent_reads))]
            self._recent_reads[group, names] = table
            return table

    def _take(self, rows: Integers | None, names: Sequence[str]) -> pa.Table:
        """Return columns of these rows, in this order. rows: None for all rows."""
        import pyarrow as pa

        if rows is None or (len(rows) == len(self) and _is_range(rows)):
            read = [self._read(number, names) for number in range(len(self.groups))]
            return pa.concat_tables(read or [manifest_parquet.empty_table(names)])
        groups = np.searchsorted(self._starts, rows, "right") - 1
        order = None if np.all(groups[1:] >= groups[:-1]) else np.argsort(groups, kind="stable")
        if order is not None:
            rows, groups = rows[order], groups[order]
        begins = np.flatnonzero(np.diff(groups, prepend=-1))
        numbers, cuts = groups[begins], [*begins.tolist(), len(rows)]
        taken = [
            arrow_columns.take_rows(self._read(number, names).select(names), rows[a:b] - self._starts[number])
            for number, (a, b) in zip(numbers.tolist(), itertools.pairwise(cuts), strict=True)
        ]
        table = pa.concat_tables(taken or [manifest_parquet.empty_table(names)])
        if order is not None:
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            table = arrow_columns.take_rows(table, back)
        return table

    def _rows_touching(self, which: Integers, rows: Integers, boxes: list[Box | None]) -> tuple[Integers, Integers]:
        """Return the rows that have elements in their box, with their entries of `which`.

        which: for each row the index of its box in `boxes`. A row whose box is None is kept.
        """
        axes = np.array([-1 if box is None else len(box.shape) for box in boxes])[which]
        keep = axes < 0
        table = self._take(rows, ("offset", "shape"))
        (offset, begins), (shape, begins_shape) = (arrow_columns.flat_lists(table.column(name)) for name in ("offset", "shape"))
        for count in arrow_columns.distinct(axes[~keep]):
            at = np.flatnonzero(axes == count)
            if np.any(np.diff(begins)[at] != count) or np.any(np.diff(begins_shape)[at] != count):
                raise IntegrityError(
                    f"{self.where}: a leaf of {count} axes has pieces with another number of axes; {DAMAGE_ADVICE}"
                )
            fitting = [Box((0,) * count, (0,) * count) if b is None or len(b.shape) != count else b for b in boxes]
            low, extent = (np.array([b[i] for b in fitting], np.int64).reshape(len(boxes), count)[which[at]] for i in (0, 1))
            axis = np.arange(count)
            begin, length = offset[begins[at][:, None] + axis], shape[begins_shape[at][:, None] + axis]
            keep[at] = np.all(np.minimum(begin + length, low + extent) > np.maximum(begin, low), axis=1)
        return which[keep], rows[keep]

    def _check_lengths(self, table: pa.Table) -> None:
        """Raise IntegrityError if a row states impossible lengths."""
        names = ("position", "stored", "raw", "start", "nbytes")
        position, stored, raw, start, nbytes = (arrow_columns.numpy_array(table.column(name)) for name in names)
        plain = np.ones(len(raw), bool)
        plain[arrow_columns.valid_rows(arrow_columns.one_chunk(table.column("codec")))] = False
        longest = np.maximum(stored, raw)
        if self._has_bases:
            longest = np.maximum(longest, arrow_columns.numbers_or_zero(table.column("base_stored")))
        if np.any(longest > MAX_BLOCK_BYTES):
            raise IntegrityError(
                f"{self.where} states a block of {longest.max()} bytes, and blocks have at most {MAX_BLOCK_BYTES}; "
                f"{DAMAGE_ADVICE}"
            )
        if np.any(np.minimum.reduce([position, stored, raw, start, nbytes]) < 0) or np.any(nbytes > raw - start):
            raise IntegrityError(f"{self.where}: a piece lies outside of its block; {DAMAGE_ADVICE}")
        if np.any(plain & (stored != raw)):
            raise IntegrityError(f"{self.where}: a block without a codec has different stored and raw lengths; {DAMAGE_ADVICE}")

    def _check_boxes(self, table: pa.Table) -> None:
        """Raise IntegrityError if a row is not a box of its array."""
        (whole, at), (offset, at_offset), (shape, at_shape) = (
            arrow_columns.flat_lists(table.column(n)) for n in manifest_parquet.LIST_COLUMNS
        )
        if not (np.array_equal(at, at_offset) and np.array_equal(at, at_shape)):
            raise IntegrityError(f"{self.where}: a piece has another number of axes than its array; {DAMAGE_ADVICE}")
        if np.any(offset < 0) or np.any(shape < 0) or np.any(shape > whole - offset):
            raise IntegrityError(f"{self.where}: a piece lies outside of its array; {DAMAGE_ADVICE}")


_MAX_RECENT_READS = 16
"""The number of cached reads of row groups, which take a few hundred MB at most."""


def _is_range(rows: Integers) -> bool:
    """Return whether the numbers are 0, 1, 2 …"""
    return not len(rows) or bool(rows[0] == 0 and np.all(np.diff(rows) == 1))


def _rows_of_rank(pack: pa.ChunkedArray, rank: int | None) -> Integers:
    """Return the numbers of the rows in packs that `rank` wrote (None: in any pack)."""
    pack = arrow_columns.one_chunk(pack)
    rows = arrow_columns.valid_rows(pack)
    if rank is None or not len(rows):
        return rows
    codes, names = arrow_columns.dictionary_codes(arrow_columns.take_rows(pack, rows))
    prefix = f"{rank}-"
    selected: Integers = rows[np.array([name.rpartition("/")[2].startswith(prefix) for name in names])[codes]]
    return selected


def require_whole_leaf(dtype: str, shape: Sequence[int], stored_bytes: float) -> None:
    """Check the bytes of all pieces of a leaf before memory for its shape is allocated. The caller names the leaf.

    Raises IntegrityError if its shape needs another number of bytes, and FormatError for an unknown type.
    """
    nbytes = math.prod(shape) * numpy_dtype(dtype).itemsize
    if stored_bytes != nbytes or min(shape, default=0) < 0:
        raise IntegrityError(f"the manifest covers {stored_bytes:.0f} of {nbytes} bytes; {DAMAGE_ADVICE}")
