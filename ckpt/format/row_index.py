"""An index from leaves to rows of a manifest, which needs no Python object for each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa

Integers = npt.NDArray[np.int64]


class RowIndex(NamedTuple):
    """The rows of each leaf of a table."""

    leaf_numbers: dict[str, int]
    """The number of each leaf, in the order in which leaves were saved."""
    leaf_starts: Integers
    """The index in `row_order` of the first row of each leaf, followed by the number of rows."""
    row_order: Integers | None
    """The numbers of all rows, grouped by leaf; None if the rows of the table have that order."""

    def first_rows(self) -> Integers:
        """Return the number of the first row of each leaf."""
        return self.leaf_starts[:-1] if self.row_order is None else self.row_order[self.leaf_starts[:-1]]

    def rows_of(self, leaves: Sequence[str]) -> tuple[Integers, Integers]:
        """Return the rows of these leaves, one leaf after the other, as two arrays.

        Returns the index in `leaves` of each row's leaf, and the number of each row.
        """
        number = np.array(list(map(self.leaf_numbers.get, leaves, itertools.repeat(-1))), np.int64)
        begin = np.where(number < 0, 0, self.leaf_starts[number])
        count = np.where(number < 0, 0, self.leaf_starts[number + 1] - begin)
        which = np.repeat(np.arange(len(number)), count)
        rows = np.arange(len(which)) + np.repeat(begin - np.cumsum(count) + count, count)
        return which, rows if self.row_order is None else self.row_order[rows]


def index_rows(leaf_columns: Iterable[pa.ChunkedArray]) -> RowIndex:
    """Return the index of a table. leaf_columns: its column of leaf names, one Arrow array for each row group."""
    leaf_codes: dict[str, int] = {}
    parts = []
    for column in leaf_columns:
        codes, names = arrow_columns.dictionary_codes(column)
        if leaf_codes:
            codes = np.array([leaf_codes.setdefault(name, len(leaf_codes)) for name in names], np.int64)[codes]
        else:
            leaf_codes = dict(zip(names, range(len(names)), strict=True))
        parts.append(codes)
    codes = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(codes)), bool), codes[1:] != codes[:-1]]))
    order = None
    leaves = codes[starts]
    if len(leaves) and np.bincount(leaves).max() > 1:  # the rows of a leaf are not adjacent
        leaves, first = np.unique(codes, return_index=True)
        leaves = leaves[np.argsort(first)]
        rank_of_code = np.zeros(len(leaf_codes), np.int64)
        rank_of_code[leaves] = np.arange(len(leaves))
        order = np.argsort(rank_of_code[codes], kind="stable")
        starts = np.searchsorted(rank_of_code[codes][order], np.arange(len(leaves)))
    names = list(leaf_codes)
    numbers = dict(zip(map(names.__getitem__, leaves.tolist()), range(len(leaves)), strict=True))
    return RowIndex(numbers, np.append(starts, len(codes)), order)
