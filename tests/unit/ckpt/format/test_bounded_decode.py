"""Stored data may claim any length: no read allocates memory out of proportion to the lengths that the manifest states."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest

from ckpt.format import bounded_decode, codec, json_records
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.node import wire


@pytest.mark.parametrize("name", ["lz4", "blosc", "zstd", "float_planes"])
def test_a_header_that_claims_more_bytes_is_refused_before_decoding(name: str) -> None:
    config = json.dumps({"id": name})
    stored = bytearray(codec.encode(config, np.zeros(1000, np.uint8), 1))
    at, size = {"lz4": (0, 4), "blosc": (4, 4), "zstd": (6, 0), "float_planes": (4, 4)}[name]
    if size:
        stored[at : at + size] = (1 << 30).to_bytes(size, "little")
    with pytest.raises(Exception, match="manifest states"):
        codec.decode(config, memoryview(bytes(stored)), np.empty(1000 if size else 999, np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"id": "zlib"}, {"id": "gzip"}, {"id": "bz2"}, {"id": "lzma"}, {"id": "lzma", "format": lzma.FORMAT_ALONE},
        {"id": "lzma", "format": lzma.FORMAT_RAW, "filters": [{"id": lzma.FILTER_LZMA2, "preset": 1}]},
        {"id": "lzma", "preset": 9}, {"id": "zstd"},
        {"id": "zstd", "level": 19}, {"id": "zstd", "checksum": True}, {"id": "lz4"},
        {"id": "shuffle", "elementsize": 4}, {"id": "blosc"}, {"id": "blosc", "cname": "zstd", "shuffle": 2},
        {"id": "float_planes"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("nbytes", [1, 8, 64, 256, 300, 70_000, (1 << 20) + 8])
def test_every_codec_decodes_its_bytes_and_refuses_other_lengths(config: dict[str, Any], nbytes: int) -> None:
    if config["id"] == "shuffle" and nbytes % 4:
        pytest.skip("whole elements only")
    raw = np.random.default_rng(0).integers(0, 9, nbytes, np.uint8)
    text = json.dumps(config)
    stored = codec.encode(text, raw, 1)
    out = np.empty_like(raw)
    codec.decode(text, stored, out)
    assert (out == raw).all()
    with pytest.raises(Exception, match=r".*"):
        codec.decode(text, stored, np.empty(nbytes - 1, np.uint8))
    with pytest.raises(Exception, match=r".*"):
        codec.decode(text, stored, np.empty(nbytes + 4, np.uint8))


def test_compressed_text_is_inflated_within_its_limit() -> None:
    assert bounded_decode.inflate(zlib.compress(b"x" * 100), 101) == b"x" * 100
    with pytest.raises(ValueError, match="more than 99 bytes"):
        bounded_decode.inflate(zlib.compress(b"x" * 100), 99)
    with pytest.raises(ValueError, match="early"):
        bounded_decode.inflate(zlib.compress(b"x" * 100)[:-5], 1000)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b'{"digest":' + b"9" * 100_000 + b"}"])
def test_deeply_nested_and_very_long_records_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        json_records.decode("commit", data, "x")


def test_a_record_that_is_too_long_is_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_records, "MAX_RECORD_BYTES", 10)
    with pytest.raises(IntegrityError, match="at most 10"):
        json_records.decode("repository", json_records.encode("repository", {"id": "x"}), "x")


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        b"\xdd\x00\x03\x00\x00" * 1000, b"\x91" * 100_000,
        b"".join([b"\xdd" + (40).to_bytes(4, "big"), *[b"\xdd" + (150_000).to_bytes(4, "big") + b"\x90" * 150_000] * 40]),
    ],
)  # fmt: skip
def test_messages_that_claim_more_than_they_contain_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a message|incomplete|exceeds"):
        wire.unpack(data)


@pytest.mark.slow
def test_long_messages_are_unpacked() -> None:
    value = [[b"x" * 100, n] for n in range(100_000)]
    assert wire.unpack(msgpack.packb(value)) == value


def test_gzip_of_another_writer_is_decoded() -> None:
    out = np.empty(100, np.uint8)
    codec.decode('{"id": "gzip"}', memoryview(gzip.compress(bytes(100))), out)
    assert not out.any()
