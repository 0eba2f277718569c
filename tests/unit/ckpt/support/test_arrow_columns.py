"""Arrow columns that are made and read without pandas equal those that Arrow makes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.storage.base.errors import StoreError
from ckpt.support import arrow_columns

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@given(st.lists(st.one_of(st.none(), INT64)))
def test_columns_of_numbers_equal_those_of_arrow(values: list[int | None]):
    made = arrow_columns.number_array(values)
    made.validate(full=True)
    assert made.to_pylist() == values
    assert arrow_columns.valid_rows(made).tolist() == [i for i, value in enumerate(values) if value is not None]


@pytest.mark.parametrize("kind", ["int32", "int64", "uint64"])
def test_columns_of_numpy_numbers_equal_those_of_arrow(kind: str):
    values = np.arange(20, dtype=kind)[::3]
    made = arrow_columns.number_array(values, kind)
    assert made.equals(pa.array(values))
    np.testing.assert_array_equal(arrow_columns.numpy_array(made[2:5]), values[2:5])
    np.testing.assert_array_equal(arrow_columns.numpy_array(pa.chunked_array([made[:1], made[4:]])), values[[0, 4, 5, 6]])
    assert arrow_columns.numpy_array(made[:0]).tolist() == arrow_columns.numpy_array(pa.array([], pa.int64())).tolist() == []


@given(st.lists(st.one_of(st.none(), TEXT)), st.data())
def test_columns_of_text_equal_those_of_arrow(values: list[str | None], data: st.DataObject):
    made = arrow_columns.text_array(values)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.string()))
    cut = slice(*sorted(data.draw(st.tuples(*[st.integers(0, len(values))] * 2))))
    for column in (made, made.dictionary_encode()):
        assert list(arrow_columns.python_values(column[cut])) == values[cut]
        assert arrow_columns.valid_rows(column[cut]).tolist() == [i for i, value in enumerate(values[cut]) if value is not None]


@given(st.lists(st.binary(max_size=9)))
def test_columns_of_bytes_equal_those_of_arrow(values: list[bytes]):
    assert arrow_columns.binary_array(values).equals(pa.array(values, pa.binary()))


def test_a_column_that_arrow_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arrow_columns, "_MAX_BYTES", 99)
    arrow_columns.binary_array([b"x" * 33] * 3)
    with pytest.raises(StoreError, match="100 bytes, more than 99"):
        arrow_columns.binary_array([b"x" * 25] * 4)


@given(st.lists(st.lists(INT64, max_size=3), min_size=1), st.data())
def test_columns_of_lists_equal_those_of_arrow(values: list[list[int]], data: st.DataObject):
    made = arrow_columns.list_array(values)
    assert made.equals(pa.array(values, pa.list_(pa.int64())))
    rows = data.draw(st.lists(st.integers(0, len(values) - 1)))
    taken = arrow_columns.take_rows(made, np.array(rows, np.int64))
    assert [list(row) for row in arrow_columns.python_values(taken)] == [values[row] for row in rows]
    flat, begins = arrow_columns.flat_lists(made[1:])
    assert [flat[a:b].tolist() for a, b in zip(begins, begins[1:], strict=False)] == values[1:]
