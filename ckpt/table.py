"""The manifest as a file: an Arrow table in Parquet, written whole and read by row groups.

docs/reference/format.md has its columns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckpt import arrow
from ckpt.parquet_pages import Footer, footer, page_headers
from ckpt.storage.errors import IntegrityError

GROUP_ROWS = 32_768
"""Rows of a row group, of which a reader takes those that hold its leaves. Smaller ones cost more than they save."""

TEXT = ("leaf", "dtype", "pack", "codec")
LISTS = ("global_shape", "offset", "shape")
NUMBERS = ("position", "stored", "raw", "start", "nbytes")
BINARY = ("digest", "cells")
NAMES = (
    "leaf", "dtype", "global_shape", "offset", "shape", "pack", "position", "stored", "raw", "start", "nbytes", "codec",
    "digest", "checksum", "cells",
)  # fmt: skip
"""All columns, in the order of the file."""

_EXPANSION = 256
_SMALL = 16 << 20
"""A manifest may take so many times its length in memory, and so much more. Real ones take some 20 times their length."""

_COLUMN_BYTES = 1 << 30
"""Of a binary column of a row group, at most, where it is decoded from a dictionary."""

_NULLABLE = {"pack", "codec", "checksum"}
_WHAT_ARROW_RAISES = (KeyError, ValueError, TypeError, OSError, NotImplementedError)
"""ArrowInvalid and ArrowTypeError are among them; a file that is none raises what it likes."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Some rows of a manifest; `read` gives a table of the columns that are asked for."""

    where: str
    length: int
    _read: Callable[[list[str]], Any]

    def read(self, names: Sequence[str] = NAMES) -> Any:
        """These columns as an Arrow table of the specified types; raise IntegrityError where they are of others."""
        with _told(self.where):
            return _fitting(self._read(list(names)))


def write_table(table: Any, metadata: dict[str, str]) -> bytes:
    """The table as a Parquet file with `metadata` in its schema."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        row_group_size=GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(TEXT),
        write_statistics=False,  # no reader of ours asks for them, and each load parses them
    )
    return sink.getvalue()


def read_table(data: bytes, where: str) -> Any:
    """All of a Parquet manifest as an Arrow table, its metadata in the schema; raise IntegrityError where it is none."""
    with _told(where):
        return _fitting(_open(data).read(columns=list(NAMES), use_threads=False))


def require_plausible(data: bytes) -> Footer:
    """The footer of a Parquet file; raise ValueError where the file claims rows or bytes out of proportion to its length.

    Its footer and the header of each page claim lengths, and Arrow allocates what the pages claim.
    """
    found = footer(data)
    most = _EXPANSION * len(data) + _SMALL
    stated = in_pages = values = 0
    for column in found.columns:
        stated += column.uncompressed
        for page in page_headers(data, column.begin, column.end):
            in_pages += page.uncompressed
            values += page.values
    if max(stated, in_pages, values, found.rows) > most:
        raise ValueError(
            f"it claims {found.rows} rows, {values} values and {max(stated, in_pages)} bytes, out of {len(data)} bytes"
        )
    return found


def write_part(table: Any, metadata: dict[str, str]) -> bytes:
    """The table as an Arrow IPC stream with `metadata` in its schema: what is read once, by the committer, of ten thousand
    ranks, and a Parquet file takes 15 times as long to open."""
    import pyarrow as pa

    described = plain(table).replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, described.schema) as stream:
        stream.write_table(described)
    return sink.getvalue()


def read_part(data: bytes, where: str) -> Any:
    """The counterpart of `write_part`; raise IntegrityError where it is none."""
    import pyarrow as pa

    with _told(where):
        require_uncompressed(data)
        return _fitting(pa.ipc.open_stream(pa.BufferReader(data)).read_all())


def require_uncompressed(data: bytes) -> None:
    """Raise ValueError where an Arrow IPC stream has compressed bodies: they claim any length, and parts have none."""
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(data)):
        if message.type in ("record batch", "dictionary") and _is_compressed(memoryview(message.metadata)):
            raise ValueError("its record batches are compressed")


def _is_compressed(message: memoryview) -> bool:
    """Whether the FlatBuffer of a message names a compression: field 3 of RecordBatch, which is field 1 of DictionaryBatch."""

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


def read_groups(data: bytes, where: str) -> tuple[list[RowGroup], dict[str, str]]:
    """The row groups of a Parquet manifest, not yet read, and its metadata; raise IntegrityError where it is none."""
    import pyarrow as pa

    with _told(where):
        file = _open(data)
        schema = file.schema_arrow
        for name in NAMES:
            kind = schema.field(name).type
            _kind(kind.value_type if name in BINARY and pa.types.is_dictionary(kind) else kind, name)
        lengths = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        groups = [RowGroup(where, n, _reader(file, i)) for i, n in enumerate(lengths)]
        return groups, {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}


def table_group(table: Any, where: str) -> RowGroup:
    """A table in memory as a row group."""
    return RowGroup(where, table.num_rows, table.select)


def no_rows(names: Sequence[str]) -> Any:
    """An empty table of these columns."""
    import pyarrow as pa

    return pa.table({name: pa.nulls(0, _specified(name)) for name in names})


def plain(table: Any) -> Any:
    """The table with all columns of the specified types, text as text."""
    import pyarrow as pa

    return pa.table({name: arrow.cast(table[name], _specified(name)) for name in NAMES})


def _reader(file: Any, group: int) -> Callable[[list[str]], Any]:
    return lambda names: file.read_row_group(group, columns=names, use_threads=False)


def _open(data: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # No threads: one of Arrow's rarely aborts the process at exit (apache/arrow#34314).
    found = require_plausible(data)
    # Text stays in its dictionary. So does a binary column that has one until its length is known (`_decoded`): a long
    # value may be referred to by each row. Columns of bytes that ckpt writes have none.
    with_dictionary = {column.name for column in found.columns if column.has_dictionary}
    return pq.ParquetFile(
        pa.BufferReader(data), pre_buffer=False, read_dictionary=[*TEXT, *(n for n in BINARY if n in with_dictionary)],
        thrift_string_size_limit=len(data), thrift_container_size_limit=len(data),
    )  # fmt: skip


def _decoded(column: Any, name: str) -> Any:
    """A binary column without its dictionaries; raise ValueError where that takes too much memory."""
    import pyarrow as pa
    import pyarrow.compute as pc

    total = 0
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary)
        total += pc.sum(pc.cast(pc.take(lengths, chunk.indices), pa.int64())).as_py() or 0
    if total > _COLUMN_BYTES:
        raise ValueError(f"column {name} decodes to {total} bytes")
    return column.cast(column.type.value_type)


@contextmanager
def _told(where: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, *_WHAT_ARROW_RAISES) as error:
        raise IntegrityError(f"{where} is not a manifest: {error}") from error


def _fitting(table: Any) -> Any:
    """The table with columns of the specified types; other writers may have used wider or narrower ones."""
    import pyarrow as pa

    for i, name in enumerate(table.column_names):
        column = table.column(i)
        if name in BINARY and pa.types.is_dictionary(column.type):
            column = _decoded(column, name)
            table = table.set_column(i, name, column)
        kind = _kind(column.type, name)
        if kind != column.type:
            table = table.set_column(i, name, arrow.cast(column, kind))
        if column.null_count and name not in _NULLABLE:
            raise ValueError(f"column {name} has rows without a value")
    return table


def _kind(found: Any, name: str) -> Any:
    """The type that a column should have, given the one it has; raise TypeError where one can't be made the other."""
    import pyarrow as pa

    types = pa.types
    specified = _specified(name)
    if found == specified:
        return found
    if name in TEXT:
        if types.is_dictionary(found) and types.is_string(found.value_type):
            return found
        fits = types.is_string(found) or types.is_large_string(found)
    elif name in LISTS:
        fits = (types.is_list(found) or types.is_large_list(found)) and types.is_integer(found.value_type)
    elif name in BINARY:
        fits = types.is_large_binary(found) or types.is_fixed_size_binary(found)
    else:
        fits = types.is_integer(found)
    if not (fits or types.is_null(found)):
        raise TypeError(f"column {name} is of type {found}")
    return specified


def _specified(name: str) -> Any:
    import pyarrow as pa

    if name in TEXT:
        return pa.string()
    if name in LISTS:
        return pa.list_(pa.int64())
    if name in BINARY:
        return pa.binary()
    return pa.uint64() if name == "checksum" else pa.int64()
