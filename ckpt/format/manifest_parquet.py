"""Write the manifest as a Parquet file, and read it by row groups, with checks against damaged files.

docs/reference/format.md specifies the columns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import DAMAGE_ADVICE
from ckpt.format.parquet_memory_check import Footer, page_headers, read_footer
from ckpt.storage.base.errors import IntegrityError
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_PER_GROUP = 32_768
"""Rows of a row group. A reader decodes only the row groups that have its leaves; smaller ones cost more than they save."""

TEXT_COLUMNS = ("leaf", "dtype", "pack", "codec", "base_pack", "base_codec")
LIST_COLUMNS = ("global_shape", "offset", "shape")
NUMBER_COLUMNS = ("position", "stored", "raw", "start", "nbytes")
BINARY_COLUMNS = ("digest", "cells", "base_digest")
COLUMNS = (
    "leaf", "dtype", "global_shape", "offset", "shape", "pack", "position", "stored", "raw", "start", "nbytes", "codec",
    "digest", "checksum", "cells",
)  # fmt: skip
"""The columns of every manifest, in the order of the file."""

BASE_COLUMNS = (
    "base_pack", "base_position", "base_stored", "base_codec", "base_digest", "base_checksum", "base_width",
)  # fmt: skip
"""The columns of `block_difference.BaseBlock`, which follow in a manifest with differences; null for a block in full."""

FORMAT_WITH_BASES = 2
"""The format version of a manifest with differences. All others have version 1, which programs without differences read."""

_MAX_EXPANSION = 256
_EXTRA_BYTES = 16 << 20
"""The memory of a manifest is limited to _MAX_EXPANSION times its length plus _EXTRA_BYTES. Real manifests need about 40 times
their length."""

_VALUE_BYTES = 8
"""The memory of a value in a decoded column: a number, an item of a list, or the offset of a text."""

_NULLABLE_COLUMNS = {"pack", "codec", "checksum", *BASE_COLUMNS}
_ARROW_ERRORS = (KeyError, ValueError, TypeError, OSError, NotImplementedError)
"""Errors that pyarrow raises for a malformed file; ArrowInvalid and ArrowTypeError are subclasses of some of them."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Some rows of a manifest, whose columns are read on demand."""

    where: str
    row_count: int
    _read: Callable[[list[str]], pa.Table]
    has_bases: bool = False
    """Whether it has the columns of bases. Without them, they are read as nulls."""

    def read(self, names: Sequence[str] = COLUMNS) -> pa.Table:
        """Return columns as an Arrow table of the specified types; raise IntegrityError if a type cannot be converted."""
        import pyarrow as pa

        missing = () if self.has_bases else [name for name in names if name in BASE_COLUMNS]
        with _raising_integrity_error(self.where):
            table = _cast_to_specified(self._read([name for name in names if name not in missing]))
        for name in missing:
            table = table.append_column(name, pa.nulls(self.row_count, _specified_type(name)))
        return table


def write_table(table: pa.Table, metadata: dict[str, str]) -> bytes:
    """Return the table as a Parquet file with `metadata` and the format version in its schema.

    The file is not compressed if a reader would refuse it as too small for its content.
    """
    data = _as_parquet(table, metadata, "zstd")
    try:
        require_plausible(data)
    except ValueError:  # as for long names with much in common
        data = _as_parquet(table, metadata, "none")
    return data


def _as_parquet(table: pa.Table, metadata: dict[str, str], compression: str) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    version = FORMAT_WITH_BASES if "base_pack" in table.column_names else 1
    pq.write_table(
        table.replace_schema_metadata({**metadata, "format": str(version)}),
        sink,
        row_group_size=ROWS_PER_GROUP,
        compression=compression,
        compression_level=1 if compression == "zstd" else None,
        use_dictionary=[name for name in TEXT_COLUMNS if name in table.column_names],
        write_statistics=False,  # no reader of ckpt uses them, and each load would parse them
    )
    return sink.getvalue()


def read_table(data: bytes, where: str) -> pa.Table:
    """Return a whole Parquet manifest as an Arrow table, its metadata in the schema; raise IntegrityError if it is not one."""
    with _raising_integrity_error(where):
        file = _open_parquet(data)
        table = file.read(columns=_columns_of(file.schema_arrow.names), use_threads=False)
        return _cast_to_specified(_without_dictionaries(table, _max_memory(data)))


def _max_memory(data: bytes) -> int:
    return _MAX_EXPANSION * len(data) + _EXTRA_BYTES


def require_plausible(data: bytes) -> Footer:
    """Return the footer of a Parquet file; raise ValueError if it claims too many rows or bytes for its length.

    The footer and the header of each page claim lengths, and Arrow allocates what the pages claim.
    """
    found = read_footer(data)
    most = _max_memory(data)
    stated = in_pages = values = 0
    for column in found.columns:
        stated += column.uncompressed_bytes
        for page in page_headers(data, column.begin, column.end):
            in_pages += page.uncompressed_bytes
            values += page.value_count
    values = max(values, found.row_count * len({column.name for column in found.columns}))
    if max(stated, in_pages, _VALUE_BYTES * values) > most:
        raise ValueError(
            f"it claims {found.row_count} rows, {values} values and {max(stated, in_pages)} bytes, but has {len(data)} bytes"
        )
    return found


def write_part(table: pa.Table, metadata: dict[str, str]) -> bytes:
    """Return the table of a rank part as an Arrow IPC stream with `metadata` in its schema.

    The committer reads each part once, for up to ten thousand ranks, and a Parquet file takes 15 times as long to open.
    """
    import pyarrow as pa

    described = as_plain_table(table).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, described.schema) as stream:
        stream.write_table(described)
    return sink.getvalue()


def read_part(data: bytes, where: str) -> pa.Table:
    """Return the table that `write_part` wrote; raise IntegrityError if `data` is not one."""
    import pyarrow as pa

    with _raising_integrity_error(where, "rank part"):
        require_uncompressed(data)
        table = pa.ipc.open_stream(pa.BufferReader(data)).read_all()
        return _cast_to_specified(_without_dictionaries(table, _max_memory(data)))


def require_uncompressed(data: bytes) -> None:
    """Raise ValueError if an Arrow IPC stream has compressed bodies: they may claim any length, and `write_part` makes none."""
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(data)):
        if message.type in ("record batch", "dictionary") and _is_compressed(memoryview(message.metadata)):
            raise ValueError("its record batches are compressed")


def _is_compressed(message: memoryview) -> bool:
    """Return whether a message, a FlatBuffer, names a compression.

    That is field 3 of a RecordBatch. A DictionaryBatch has its RecordBatch in field 1.
    """

    def field(table: int, number: int) -> int | None:
        entries = table - int.from_bytes(message[table : table + 4], "little", signed=True)
        if 4 + 2 * number >= int.from_bytes(message[entries : entries + 2], "little"):
            return None
        offset = int.from_bytes(message[entries + 4 + 2 * number : entries + 6 + 2 * number], "little")
        return table + offset if offset else None

    def target(at: int) -> int:
        return at + int.from_bytes(message[at : at + 4], "little")

    root = target(0)
    kind, header = field(root, 1), field(root, 2)
    if kind is None or header is None:
        return False
    batch = target(header)
    if message[kind] == 2:  # a DictionaryBatch
        inner = field(batch, 1)
        if inner is None:
            return False
        batch = target(inner)
    return field(batch, 3) is not None


def read_row_groups(data: bytes, where: str) -> tuple[list[RowGroup], dict[str, str]]:
    """Return the row groups of a Parquet manifest, not yet read, and its metadata; raise IntegrityError if it is not one."""
    import pyarrow as pa

    with _raising_integrity_error(where):
        file = _open_parquet(data)
        schema = file.schema_arrow
        has_bases = "base_pack" in schema.names
        for name in COLUMNS + BASE_COLUMNS if has_bases else COLUMNS:
            kind = schema.field(name).type
            _target_type(kind.value_type if name in BINARY_COLUMNS and pa.types.is_dictionary(kind) else kind, name)
        lengths = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        most = _max_memory(data)
        groups = [RowGroup(where, n, _row_group_reader(file, i, most), has_bases) for i, n in enumerate(lengths)]
        return groups, {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}


def row_group_of(table: pa.Table, where: str) -> RowGroup:
    """Return a table in memory as a row group."""
    return RowGroup(where, table.num_rows, table.select, "base_pack" in table.column_names)


def empty_table(names: Sequence[str]) -> pa.Table:
    """Return an empty table of these columns."""
    import pyarrow as pa

    return pa.table({name: pa.nulls(0, _specified_type(name)) for name in names})


def as_plain_table(table: pa.Table, with_bases: bool = False) -> pa.Table:
    """Return the table with all columns of the specified types, text without dictionaries.

    with_bases: add the columns of bases, with nulls where the table has none.
    """
    import pyarrow as pa

    names = COLUMNS + BASE_COLUMNS if with_bases else _columns_of(table.column_names)
    return pa.table({
        name: arrow_columns.cast(table[name], _specified_type(name))
        if name in table.column_names
        else pa.nulls(table.num_rows, _specified_type(name))
        for name in names
    })  # fmt: skip


def _columns_of(names: Sequence[str]) -> list[str]:
    """Return the columns of a manifest that has columns of these names."""
    return [*COLUMNS, *(BASE_COLUMNS if "base_pack" in names else ())]


def _row_group_reader(file: pq.ParquetFile, group: int, most: int) -> Callable[[list[str]], pa.Table]:
    return lambda names: _without_dictionaries(file.read_row_group(group, columns=names, use_threads=False), most)


def _open_parquet(data: bytes) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # No threads: a thread of Arrow rarely aborts the process at exit (apache/arrow#34314).
    found = require_plausible(data)
    # Text stays in its dictionary. A binary column with a dictionary stays in it until `_without_dictionaries` has checked
    # the decoded length, since every row may refer to one long value. Binary columns that ckpt writes have no dictionary.
    names = {column.name for column in found.columns}
    with_dictionary = {column.name for column in found.columns if column.has_dictionary}
    return pq.ParquetFile(
        pa.BufferReader(data),
        pre_buffer=False,
        read_dictionary=[*(n for n in TEXT_COLUMNS if n in names), *(n for n in BINARY_COLUMNS if n in with_dictionary)],
        thrift_string_size_limit=len(data),
        thrift_container_size_limit=len(data),
    )


def _without_dictionaries(table: pa.Table, most: int) -> pa.Table:
    """Return the table with binary columns without dictionaries; raise ValueError if they need more than `most` bytes."""
    import pyarrow as pa

    encoded = [name for name in BINARY_COLUMNS if name in table.column_names and pa.types.is_dictionary(table[name].type)]
    if not encoded:
        return table
    import pyarrow.compute as pc  # slow, but ckpt writes no such column: another program wrote this file

    total = 0
    for chunk in (chunk for name in encoded for chunk in table[name].chunks):
        lengths = pc.binary_length(chunk.dictionary)
        total += pc.sum(pc.cast(pc.take(lengths, chunk.indices), pa.int64())).as_py() or 0
    if total > most:
        raise ValueError(f"{' and '.join(encoded)} decode to {total} bytes")
    for name in encoded:
        column = table[name]
        table = table.set_column(table.column_names.index(name), name, column.cast(column.type.value_type))
    return table


@contextmanager
def _raising_integrity_error(where: str, kind: str = "manifest") -> Iterator[None]:
    """Raise IntegrityError for the errors of Arrow: the file `where` is not a `kind`."""
    import pyarrow as pa

    try:
        yield
    except MemoryError:  # also an ArrowException, and no damage
        raise
    except (pa.ArrowException, *_ARROW_ERRORS) as error:
        raise IntegrityError(f"{where} is not a {kind} ({error}); {DAMAGE_ADVICE}") from error


def _cast_to_specified(table: pa.Table) -> pa.Table:
    """Return the table with columns of the specified types; other writers may have used wider or narrower types."""
    for i, name in enumerate(table.column_names):
        column = table.column(i)
        kind = _target_type(column.type, name)
        if kind != column.type:
            table = table.set_column(i, name, arrow_columns.cast(column, kind))
        if name in TEXT_COLUMNS:
            table.column(i).validate(full=True)  # Parquet does not check that text is UTF-8
        if column.null_count and name not in _NULLABLE_COLUMNS:
            raise ValueError(f"column {name} has rows without a value")
    return table


def _target_type(found: pa.DataType, name: str) -> pa.DataType:
    """Return the type to which a column of type `found` is cast; raise TypeError if it cannot be cast."""
    import pyarrow as pa

    types = pa.types
    specified = _specified_type(name)
    if found == specified:
        return found
    if name in TEXT_COLUMNS:
        if types.is_dictionary(found) and types.is_string(found.value_type):
            return found
        fits = types.is_string(found) or types.is_large_string(found)
    elif name in LIST_COLUMNS:
        fits = (types.is_list(found) or types.is_large_list(found)) and types.is_integer(found.value_type)
    elif name in BINARY_COLUMNS:
        fits = types.is_large_binary(found) or types.is_fixed_size_binary(found)
    else:
        fits = types.is_integer(found)
    if not (fits or types.is_null(found)):
        raise TypeError(f"column {name} is of type {found}")
    return specified


def _specified_type(name: str) -> pa.DataType:
    import pyarrow as pa

    if name in TEXT_COLUMNS:
        return pa.string()
    if name in LIST_COLUMNS:
        return pa.list_(pa.int64())
    if name in BINARY_COLUMNS:
        return pa.binary()
    return pa.uint64() if name in ("checksum", "base_checksum") else pa.int64()
