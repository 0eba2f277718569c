"""Parse footer and page headers of a Parquet file, to check the memory they claim before Arrow allocates it.

Both are Thrift structs in the compact protocol (parquet.thrift: FileMetaData, PageHeader). They are parsed here because
pyarrow aborts the process when it reads the columns of a malformed footer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_MAX_DEPTH = 32
_BOOL_TRUE, _BOOL_FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)

Value = Any
"""An integer, bytes, a list, or the fields of a struct; None for a value that is skipped."""
Fields = dict[int, Value]
_MAGIC = b"PAR1"


class ColumnChunk(NamedTuple):
    """One column of one row group, as the footer describes it."""

    name: str
    uncompressed_bytes: int
    begin: int
    """Position in the file of the first page."""
    end: int
    """Position in the file after the last page."""
    has_dictionary: bool


class Footer(NamedTuple):
    """The number of rows and the columns that a footer claims."""

    row_count: int
    columns: list[ColumnChunk]


def read_footer(data: bytes) -> Footer:
    """Return the footer of a Parquet file; raise ValueError if `data` is not one."""
    if len(data) < 12 or data[-4:] != _MAGIC:
        raise ValueError("not a Parquet file")
    end = len(data) - 8
    begin = end - int.from_bytes(data[-8:-4], "little")
    if begin < 4:
        raise ValueError("its footer is longer than the file")
    try:
        groups = _struct(data, begin, end)[0][4]
        columns = [_column_chunk(chunk[3]) for group in groups for chunk in group[1]]
        return Footer(sum(group[3] for group in groups), columns)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("its footer is damaged") from error


def _column_chunk(meta: Fields) -> ColumnChunk:
    data_page, dictionary = meta[9], meta.get(11)
    begin = data_page if not dictionary else min(data_page, dictionary)
    length = meta[7] if meta[5] > 0 else 0  # Arrow reads no page of a column without values, whose offsets may be wrong
    return ColumnChunk(b".".join(meta[3]).decode(errors="replace"), meta[6], begin, begin + length, bool(dictionary))


class PageHeader(NamedTuple):
    """The sizes that a page header claims."""

    uncompressed_bytes: int
    """Bytes after decompression."""
    compressed_bytes: int
    value_count: int


def page_headers(data: bytes, begin: int, end: int) -> Iterator[PageHeader]:
    """Yield the headers of the pages in bytes [begin, end) of a file; raise ValueError if they are malformed."""
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a column lies beyond the end of the file")
    while begin < end:
        try:
            fields, at = _struct(data, begin, end)
        except IndexError:
            raise ValueError("a page header ends beyond the file") from None
        uncompressed, compressed = fields.get(2), fields.get(3)
        if not isinstance(uncompressed, int) or not isinstance(compressed, int) or uncompressed < 0 or compressed < 0:
            raise ValueError("a page states no sizes")
        values = 0
        for kind in (5, 7, 8):  # a data page, a dictionary page, a data page of version 2
            header = fields.get(kind)
            if isinstance(header, dict) and isinstance(count := header.get(1), int):
                values += max(0, count)
        yield PageHeader(uncompressed, compressed, values)
        begin = at + compressed
    if begin > end:
        raise ValueError("a page ends beyond its column")


def _struct(data: bytes, at: int, end: int, depth: int = 0) -> tuple[Fields, int]:
    """Return the fields of a struct by number, and the position after it.

    Each load parses hundreds of small values, so the frequent types are handled inline. A read beyond `data` raises IndexError;
    a read beyond `end` is detected at the end of the struct.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    found: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if kind in _INTEGERS:
            value = data[at]
            at += 1
            if value > 127:
                value, at = _unsigned(data, at - 1)
            found[number] = value >> 1 ^ -(value & 1)
        elif kind in (_BOOL_TRUE, _BOOL_FALSE):
            found[number] = None
        elif kind == _STRUCT:
            found[number], at = _struct(data, at, end, depth + 1)
        else:
            found[number], at = _value(data, at, end, kind, depth)
    if at >= end:
        raise ValueError("it ends early")
    return found, at + 1


def _value(data: bytes, at: int, end: int, kind: int, depth: int) -> tuple[Value, int]:
    """Return a value of a type that `_struct` does not handle inline, or an element of a list, and the position after it."""
    if kind == _BINARY:
        length, at = _unsigned(data, at)
        if length > end - at:
            raise ValueError("it ends early")
        return data[at : at + length], at + length
    if kind in (_LIST, _SET):
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        head = data[at]
        count, at = _unsigned(data, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
        if count > end - at:
            raise ValueError("a list claims more elements than the file has bytes")
        values = []
        for _ in range(count):
            value, at = _value(data, at, end, head & 15, depth + 1)
            values.append(value)
        return values, at
    if kind == _STRUCT:
        return _struct(data, at, end, depth + 1)
    if kind in _INTEGERS:
        return _signed(data, at)
    if kind in (_BOOL_TRUE, _BOOL_FALSE, _BYTE):  # an element of a list takes one byte
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    raise ValueError(f"unexpected type {kind}")  # maps (11) included: these structs contain none


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > 127:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("not a number of the compact protocol")
    return value | byte << shift, at + 1


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _unsigned(data, at)
    return value >> 1 ^ -(value & 1), at
