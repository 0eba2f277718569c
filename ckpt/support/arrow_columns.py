"""Convert between Arrow columns and values of numpy and Python, without the calls that import pandas.

`pyarrow.array`, `pyarrow.scalar`, `Schema.empty_table` and `to_numpy` are not used, and no numpy array is passed to Arrow's
functions: each makes Arrow import pandas if it is installed, which takes longer than the first save of a small state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt.storage.base.errors import StoreError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow._compute import FunctionOptions

    Column: TypeAlias = pa.Array | pa.ChunkedArray

T = TypeVar("T")

_MAX_BYTES = 2**31 - 1
"""The most bytes of a column of texts or bytes, whose offsets are 32-bit numbers."""

# --- into Arrow --------------------------------------------------------------------------------------------------


def number_array(values: npt.NDArray[Any] | Iterable[int | None], kind: str = "int64") -> pa.Array:
    """Return numbers as an Arrow array.

    values: a numpy array, or a sequence in which None is null. kind: the name of a numpy type.
    """
    import pyarrow as pa

    valid = None
    if not isinstance(values, np.ndarray):
        values = list(values)
        if None in values:
            valid = _bitmap([value is not None for value in values])
            values = [value or 0 for value in values]
    data = np.ascontiguousarray(values, kind)
    return pa.Array.from_buffers(getattr(pa, kind)(), len(data), [valid, pa.py_buffer(data)])


def text_array(values: Sequence[str | None]) -> pa.Array:
    """Return strings as an Arrow array; None is null."""
    import pyarrow as pa

    return _variable_length_array(pa.string(), [None if value is None else value.encode() for value in values])


def binary_array(values: Sequence[bytes | None]) -> pa.Array:
    """Return bytes as an Arrow array; None is null."""
    import pyarrow as pa

    return _variable_length_array(pa.binary(), values)


def _variable_length_array(kind: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    import pyarrow as pa

    valid = None
    if None in values:
        valid = _bitmap([value is not None for value in values])
    filled = [value or b"" for value in values]
    ends = np.zeros(len(filled) + 1, np.int64)
    np.cumsum(list(map(len, filled)), out=ends[1:])
    if ends[-1] > _MAX_BYTES:
        raise StoreError(f"a column of the manifest needs {ends[-1]} bytes, more than {_MAX_BYTES}: save with more ranks")
    buffers = [valid, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(filled))]
    return pa.Array.from_buffers(kind, len(filled), buffers)


def _bitmap(flags: Sequence[bool]) -> pa.Buffer:
    """Return the validity bitmap of an Arrow array."""
    import pyarrow as pa

    return pa.py_buffer(np.packbits(np.array(flags, bool), bitorder="little"))


def compute_function(function: str, *columns: Column | pa.Table, options: FunctionOptions | None = None) -> Any:
    """Return the result of one of Arrow's compute functions, given by name.

    `pyarrow.compute` is not used: importing it generates a documented Python function for each compute function, a quarter of
    the import time of a first load. Methods of columns and tables such as `take` and `cast` import it too.
    """
    from pyarrow._compute import call_function

    return call_function(function, list(columns), options)


def cast(column: Column, kind: pa.DataType) -> Column:
    """Return the column as one of type `kind`; raise ArrowInvalid if a value does not fit."""
    from pyarrow._compute import CastOptions

    return column if column.type == kind else compute_function("cast", column, options=CastOptions.safe(kind))


def take_rows(column: T, rows: npt.NDArray[np.integer[Any]]) -> T:
    """Return the rows of an Arrow array or table with these numbers, in this order; the result has the type of `column`."""
    taken: T = compute_function("take", column, number_array(rows))
    return taken


def dictionary_encoded(column: Column) -> Column:
    """Return a text column in dictionary encoding."""
    return compute_function("dictionary_encode", column)


def valid_rows(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows of an Arrow array that are not null."""
    if not column.null_count:
        return np.arange(len(column))
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    return np.flatnonzero(bits[column.offset : column.offset + len(column)])


def one_chunk(column: Column) -> pa.Array:
    """Return a column of a table as one Arrow array."""
    import pyarrow as pa

    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def list_array(values: Sequence[Sequence[int]]) -> pa.ListArray:
    """Return a list column, built from flat numbers: pyarrow converts nested Python lists ten times as slowly."""
    lengths = [len(v) for v in values]
    return list_array_of_flat(np.fromiter(itertools.chain.from_iterable(values), np.int64, sum(lengths)), lengths)


def list_array_of_flat(flat: npt.NDArray[Any], lengths: Sequence[int] | npt.NDArray[Any]) -> pa.ListArray:
    """Return a list column of these numbers. lengths: how many numbers each row has."""
    import pyarrow as pa

    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.ListArray.from_arrays(number_array(ends, "int32"), number_array(flat), type=pa.list_(pa.int64()))


# --- out of Arrow ------------------------------------------------------------------------------------------------


def numpy_array(column: Column) -> npt.NDArray[Any]:
    """Return a column of integers without nulls as a numpy array. Only a column of several chunks is copied."""
    column = one_chunk(column)
    kind = np.dtype(str(column.type))
    data = column.buffers()[1]
    return np.zeros(0, kind) if data is None else np.frombuffer(data, kind, len(column), column.offset * kind.itemsize)


def numbers_or_zero(column: Column) -> npt.NDArray[np.int64]:
    """Return a column of integers as a numpy array with 0 for nulls."""
    column = one_chunk(column)
    numbers = np.zeros(len(column), np.int64)
    rows = valid_rows(column)
    numbers[rows] = numpy_array(column)[rows]
    return numbers


def bool_array(column: Column) -> npt.NDArray[np.bool_]:
    """Return a Boolean column without nulls as a numpy array."""
    import pyarrow as pa

    return numpy_array(cast(column, pa.uint8())).astype(bool)


def flat_lists(column: Column) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return a list column as flat numbers, and the index of the first number of each row followed by their total."""
    column = one_chunk(column)
    ends = numpy_array(column.offsets)
    return numpy_array(column.values)[ends[0] : ends[-1]], ends - ends[0]


def dictionary_codes(column: Column) -> tuple[npt.NDArray[Any], list[str]]:
    """Return a text column without nulls as codes, and the list of texts that they index; some texts may be unused."""
    import pyarrow as pa

    column = _decoded_if_short(one_chunk(column))
    if not pa.types.is_dictionary(column.type):
        column = dictionary_encoded(column)
    return numpy_array(column.indices), column.dictionary.to_pylist()


def _decoded_if_short(column: pa.Array) -> pa.Array:
    """Return the column, decoded to text if it has fewer rows than its dictionary has entries."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type) and len(column) < len(column.dictionary):
        return cast(column, column.type.value_type)
    return column


def python_values(column: Column) -> Iterable[Any]:
    """Return a column as Python objects, through numpy where it has no nulls, which is ten times as fast as pyarrow."""
    import pyarrow as pa

    column = _decoded_if_short(one_chunk(column))
    kind = column.type
    if pa.types.is_list(kind):
        return _tuples(*flat_lists(column))
    if pa.types.is_dictionary(kind):
        entries = [*column.dictionary.to_pylist(), None]
        codes = np.full(len(column), -1)
        codes[valid_rows(column)] = numpy_array(compute_function("drop_null", column.indices))
        return [entries[code] for code in codes.tolist()]
    if pa.types.is_integer(kind):
        if column.null_count == len(column):
            return [None] * len(column)
        if not column.null_count:
            return numpy_array(column).tolist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def distinct(numbers: npt.NDArray[Any]) -> list[int]:
    """Return the distinct values of small non-negative integers, in order. np.unique would import numpy.ma in 10 ms."""
    return np.flatnonzero(np.bincount(numbers)).tolist()


def _tuples(flat: npt.NDArray[Any], begins: npt.NDArray[Any]) -> list[tuple[int, ...]]:
    """Return rows of numbers as tuples. Rows of one length are converted together, four times as fast as one by one."""
    lengths = np.diff(begins)
    made = np.empty(len(lengths), object)
    for length in distinct(lengths):
        rows = np.flatnonzero(lengths == length)
        numbers = iter(flat[begins[rows][:, None] + np.arange(length)].reshape(-1).tolist())
        tuples: Iterable[tuple[int, ...]] = zip(*[numbers] * length, strict=False) if length else [()] * len(rows)
        made[rows] = np.fromiter(tuples, object, len(rows))
    return made.tolist()  # type: ignore[no-any-return]
