"""A small file that decodes to very many bytes is refused, or is decoded with bounded memory."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

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
import resource, sys
import numpy as np
import numcodecs
from ckpt.format import codec
stored, out = open(sys.argv[1], "rb").read(), np.empty(1 << 20, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    codec.decode(sys.argv[2], memoryview(stored), out)
except MemoryError:
    raise
except Exception as error:
    print(type(error).__name__)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10)
"""


@pytest.mark.parametrize("name", ["zlib", "gzip", "bz2", "lzma", "zstd"])
def test_decoding_a_bomb_takes_little_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(_stream(name))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), json.dumps({"id": name})], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    kind, taken = done.stdout.split()
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
        with pytest.raises(IntegrityError, match=r"claims|decodes to"):
            manifest_parquet.read_table(data, "x")
        with pytest.raises(IntegrityError, match=r"claims|decodes to"):
            groups, _ = manifest_parquet.read_row_groups(data, "x")
            groups[0].read()


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
