"""A small file that decodes to very many bytes is refused, or is decoded with bounded memory."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import finish, python

from ckpt.format import manifest_parquet
from ckpt.storage.base.errors import IntegrityError

_BOMB = 1 << 29


_ALLOWED = 200 << 20
"""More memory than imports and the window of the decoder take, and a fraction of the decoded size of each bomb."""


def _stream(name: str) -> bytes:
    """Return zeros of `_BOMB` bytes, encoded chunk by chunk."""
    chunks = [bytes(16 << 20)] * (_BOMB >> 24)
    if name == "zstd":
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            for chunk in chunks:
                stream.write(chunk)
        return bytes(sink.getvalue())
    encoder: Any = {
        "zlib": lambda: zlib.compressobj(9),
        "gzip": lambda: zlib.compressobj(9, wbits=31),
        "bz2": bz2.BZ2Compressor,
        "lzma": lambda: lzma.LZMACompressor(preset=0),
    }[name]()
    return b"".join(encoder.compress(chunk) for chunk in chunks) + encoder.flush()


_CHILD = """
import sys
import numpy as np
import numcodecs
from ckpt.format import codec
from helpers.peak_memory import peak_bytes
stored, out = open(sys.argv[1], "rb").read(), np.empty(1 << 20, np.uint8)
before = peak_bytes()
try:
    codec.decode(sys.argv[2], memoryview(stored), out)
except MemoryError:
    raise
except Exception as error:
    print(type(error).__name__)
print(peak_bytes() - before)
"""


@pytest.mark.parametrize("name", ["zlib", "gzip", "bz2", "lzma", "zstd"])
def test_decoding_a_bomb_takes_little_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(_stream(name))
    kind, taken = finish(python(_CHILD, path, json.dumps({"id": name})), timeout=300).split()
    assert kind
    assert int(taken) < _ALLOWED


def _parquet(rows: int, *, cells: bytes = b"", dictionary: bool = False) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "leaf": pa.array(["w"] * rows), "dtype": pa.array(["u1"] * rows), "pack": pa.array(["p"] * rows),
        "codec": pa.nulls(rows, pa.string()), "checksum": pa.nulls(rows, pa.uint64()),
        "digest": pa.array([b"d" * 16] * rows, pa.binary()), "cells": pa.array([cells] * rows, pa.binary()),
        **{name: pa.array([[0]] * rows, pa.list_(pa.int64())) for name in manifest_parquet.LIST_COLUMNS},
        **{name: pa.array([0] * rows, pa.int64()) for name in manifest_parquet.NUMBER_COLUMNS},
    }  # fmt: skip
    made = pa.table({name: columns[name] for name in manifest_parquet.COLUMNS})
    sink = io.BytesIO()
    pq.write_table(
        made, sink, compression="zstd", use_dictionary=[*manifest_parquet.TEXT_COLUMNS, *(["cells"] if dictionary else [])]
    )
    return sink.getvalue()


def test_a_manifest_that_decodes_to_far_more_than_its_length_is_refused() -> None:
    for data in (_parquet(200, cells=bytes(1 << 20)), _parquet(3000, cells=bytes(1 << 19), dictionary=True)):
        assert len(data) < 1 << 18
        with pytest.raises(IntegrityError, match=r"claims|decode to"):
            manifest_parquet.read_table(data, "x")
        with pytest.raises(IntegrityError, match=r"claims|decode to"):
            groups, _ = manifest_parquet.read_row_groups(data, "x")
            groups[0].read()


def _without_variety(rows: int) -> bytes:
    """Return a manifest of equal rows, with dictionaries in all columns, so that a row takes a fraction of a byte."""
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(_parquet(1)))
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", use_dictionary=True, write_statistics=False) as writer:
        for begin in range(0, rows, 1 << 18):
            writer.write_table(table.take([0] * min(1 << 18, rows - begin)))
    return sink.getvalue()


def test_a_small_manifest_of_very_many_rows_is_refused() -> None:
    data = _without_variety(1 << 20)
    assert len(data) < 1 << 17  # as rows of Python, they would take gigabytes
    with pytest.raises(IntegrityError, match="claims 1048576 rows"):
        manifest_parquet.read_row_groups(data, "x")
    with pytest.raises(IntegrityError, match="claims 1048576 rows"):
        manifest_parquet.read_table(data, "x")
    assert manifest_parquet.read_table(_without_variety(100_000), "x").num_rows == 100_000


def test_the_binary_columns_together_are_limited() -> None:
    # 100 rows refer to one value of 256 KiB: 25 MiB from a file of 4 KiB, which may take 17 MiB.
    data = _parquet(100, cells=bytes(1 << 18), dictionary=True)
    assert len(data) < 1 << 13
    with pytest.raises(IntegrityError, match="cells decode to 26214400 bytes"):
        manifest_parquet.read_table(data, "x")
    groups, _ = manifest_parquet.read_row_groups(data, "x")
    with pytest.raises(IntegrityError, match="cells decode to 26214400 bytes"):
        groups[0].read(["cells"])


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_long_valid_manifest_is_read(dictionary: bool) -> None:
    data = _parquet(50_000, cells=b"12345678", dictionary=dictionary)
    assert manifest_parquet.read_table(data, "x").num_rows == 50_000
    groups, _ = manifest_parquet.read_row_groups(data, "x")
    assert groups[0].read(["cells"]).column("cells")[0].as_py() == b"12345678"


def test_any_changed_byte_of_a_manifest_is_refused_or_read() -> None:
    """A wrong page header raises IntegrityError, no other error, and causes no endless loop."""
    data = _parquet(40, cells=b"12345678")
    refused, lengths = 0, set()
    for at in range(4, len(data) - 8, 3):
        changed = bytearray(data)
        changed[at] ^= 0x55
        try:
            lengths.add(manifest_parquet.read_table(bytes(changed), "x").num_rows)
        except IntegrityError:
            refused += 1
    assert lengths == {40}, "the digest of a manifest finds other changes, but a table has all of its rows"
    assert refused > 0


def test_a_part_with_compressed_bodies_is_refused() -> None:
    import pyarrow as pa

    rows = manifest_parquet.read_table(_parquet(10), "x")
    assert manifest_parquet.read_part(manifest_parquet.write_part(rows, {}), "x").num_rows == 10
    sink = io.BytesIO()
    plain = manifest_parquet.as_plain_table(rows)
    with pa.ipc.new_stream(sink, plain.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(plain)
    with pytest.raises(IntegrityError, match="compressed"):
        manifest_parquet.read_part(sink.getvalue(), "x")
