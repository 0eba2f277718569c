"""The codec float_planes: lossless for every type, small for floats, described by the format page, safe on forged bytes."""

from __future__ import annotations

import base64
import json
import random
import struct
import subprocess
import sys

import ml_dtypes
import numcodecs
import numpy as np
import pytest
from helpers.page_reader import joined_planes

from ckpt.format import codec
from ckpt.format.bounded_decode import zstd_content_bytes
from ckpt.storage.base.errors import IntegrityError

_CONFIG = json.dumps({"id": "float_planes"})
_TYPES = [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]


def _encode(array: np.ndarray) -> bytes:
    return bytes(codec.encode(_CONFIG, array.reshape(-1).view(np.uint8), array.itemsize))


def _decode(stored: bytes, nbytes: int) -> bytes:
    out = np.full(nbytes, 0xEE, np.uint8)
    codec.decode(_CONFIG, memoryview(stored), out)
    return out.tobytes()


@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 63, 1000, 20_001, 400_003])
def test_every_value_is_restored(dtype: type, count: int) -> None:
    rng = np.random.default_rng(count)
    itemsize = np.dtype(dtype).itemsize
    for raw in (
        rng.integers(0, 256, count * itemsize, np.uint8),
        np.zeros(count * itemsize, np.uint8),
        (0.02 * rng.standard_normal(count)).astype(dtype).view(np.uint8),
    ):
        stored = bytes(codec.encode(_CONFIG, raw, itemsize))
        assert _decode(stored, len(raw)) == raw.tobytes()
        assert len(stored) <= len(raw) + 8 + 4 * itemsize


def test_a_reader_written_after_the_format_page_decodes_it() -> None:
    rng = np.random.default_rng(1)
    for array in (
        (0.02 * rng.standard_normal(5001)).astype(ml_dtypes.bfloat16),
        rng.standard_normal(5001).astype(np.float16),
        rng.standard_normal(5001).astype(np.float16).astype(np.float32),
        np.square(1e-4 * rng.standard_normal(5001).astype(np.float32)),
        rng.standard_normal(501),
        rng.integers(0, 256, 4001, np.uint8),
    ):
        assert joined_planes(_encode(array)) == array.tobytes()
    tail = np.frombuffer(_encode(np.arange(9, dtype=np.uint8)), np.uint8)
    assert joined_planes(tail.tobytes()) == bytes(range(9))


def test_bytes_of_the_first_version_stay_readable() -> None:
    stored = base64.b64decode(_FIRST_VERSION)
    k = np.arange(200, dtype=np.uint32)
    values = (k * np.uint32(2654435761) & np.uint32(0x807FFFFF)) | ((120 + k * k % np.uint32(5)) << np.uint32(23))
    assert _decode(stored, values.nbytes) == values.tobytes() == joined_planes(stored)


_FIRST_VERSION = """
AQQAACADAADIAAAAyAAAAJAAAABDAAAAALFiE8R1JteIOeqbTP2uXxDBciPUhTbnmEn6q1wNvm8g0YIz5JVG96hZCrtsHc5/MOGSQ/SlVge4aRrLfC3ej0Dx
olMEtWYXyHkq24w97p9QAbJjFMV2J9iJOuucTf6vYBHCcyTVhjfomUr7rF0Ov3Ah0oM05ZZH+KlaC7xtHs+AMeKTRPWmVwi5ahvMfS7fkEHyo1QFtmcYyXor
3I0+76BRArNkFcZ3KNmKO+ydTv+wYRLDdCXWhzjpmkv8rV4PwHEi04Q15pcAefNt5mDaU81HwDq0LachmxSOCIH7de5o4lvVT8lCvDavKaMclhCJA333cOpk
3VfRSsQ+tzGrJZ4YkguF/3jybOVf2VPMRsA5sy2mIJoTjQeB+nTuZ+Fb1E7IQbs1riiiHJUPiQJ89m/pY9xW0ErDPbcwqiSdF5EKhP548WvlXthSy0W/OLIs
ph+ZE4wGgPlz7WbgWtRNx0G6NK4noRuUDogCe/Vv6GLcVc9Jwjy2L6kjnRaQCoP9d/Bq5F3XUctEvjixK6UemCi1L/0gyD0EACQHALduJt0VzAQ78yriGVGI
QPcvZp5VjER7s2qiWRHIALdvJt4VzQQ88yuNRHyza6JaEckaUYlA+C9nnla4byfeFs0FPPQr40V8tGujWhLJAVKJQfgwZ59WjnAn3xbOBT30LOMbfbRso1sS
ygG5ikH5MGifCACAH7A92A7gB2wPtgP4SdhUGSi1L/0gyNUBAEQCPLw+vjw8vD6+vDy8Pj68PLy+PL4+vLw8vj48vjy8PD6+PLy8CAAAB4AAABAAAbTiAJAD
yAGihAE=
"""


@pytest.mark.parametrize(
    ("array", "most"),
    [
        ((0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(ml_dtypes.bfloat16), 0.68),
        ((0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(np.float16), 0.92),
        ((0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(np.float32), 0.84),
        (np.square(np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)), 0.86),
        (np.random.default_rng(0).standard_normal(1 << 20).astype(ml_dtypes.bfloat16).astype(np.float32), 0.35),
        (np.zeros(1 << 20, np.float32), 0.001),
    ],
    ids=["bf16", "fp16", "fp32", "squares", "fp32 of bf16", "zeros"],
)
def test_floats_shrink_as_far_as_their_exponents_allow(array: np.ndarray, most: float) -> None:
    pytest.importorskip("zstandard")
    assert len(_encode(array)) <= most * array.nbytes


def test_one_compressible_array_among_others_shrinks() -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    noise[300_000:500_000] = 7
    assert len(_encode(noise)) < 0.85 * noise.nbytes


_WITHOUT_ZSTANDARD = """
import sys
sys.modules["zstandard"] = None
import numpy as np
from ckpt.format import codec
array = np.sin(np.arange(100_000, dtype=np.float32))
sys.stdout.buffer.write(codec.encode('{"id": "float_planes"}', array.view(np.uint8), 4))
"""


def test_the_package_zstandard_is_not_needed() -> None:
    stored = subprocess.run([sys.executable, "-c", _WITHOUT_ZSTANDARD], check=True, capture_output=True).stdout
    array = np.sin(np.arange(100_000, dtype=np.float32))
    assert _decode(stored, array.nbytes) == array.tobytes()
    assert len(stored) < 0.95 * array.nbytes


# --- forged bytes ----------------------------------------------------------------------------------------------


def _forge(stored: bytes, rng: random.Random) -> bytes:
    forged = bytearray(stored)
    for _ in range(rng.choice([1, 1, 1, 4, 40])):
        at = rng.randrange(len(forged) if rng.random() < 0.5 else min(len(forged), 64))
        forged[at] = rng.randrange(256)
    kind = rng.randrange(4)
    if kind == 0:
        del forged[rng.randrange(len(forged)) :]
    elif kind == 1:
        forged += rng.randbytes(rng.randrange(1, 50))
    return bytes(forged)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_forged_bytes_decode_to_the_stated_length_or_raise(dtype: type) -> None:
    """A process that crashes would fail this test, too. Bytes after the end of `out` must stay as they are."""
    seed = 20261126
    print(f"seed {seed}")
    rng = random.Random(seed)
    array = (0.02 * np.random.default_rng(0).standard_normal(3001)).astype(dtype)
    stored = _encode(array)
    raised = 0
    for _ in range(1500):
        memory = np.full(array.nbytes + 64, 0xEE, np.uint8)
        try:
            codec.decode(_CONFIG, memoryview(_forge(stored, rng)), memory[: array.nbytes])
        except IntegrityError:
            raised += 1
        assert (memory[array.nbytes :] == 0xEE).all()
    assert raised


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"", "manifest states"),
        (struct.pack("<BBBBI", 1, 4, 0, 0, 400), "ends after 8 bytes"),
        (struct.pack("<BBBBI", 2, 4, 0, 0, 400) + bytes(16), "not a known form"),
        (struct.pack("<BBBBI", 1, 3, 0, 0, 400) + bytes(16), "not a known form"),
        (struct.pack("<BBBBI", 1, 1, 1, 0, 400) + bytes(16), "not a known form"),
        (struct.pack("<BBBBI", 1, 4, 0, 0, 1 << 31) + bytes(16), "manifest states"),
        (struct.pack("<BBBBI4I", 1, 4, 0, 0, 400, 101, 99, 100, 100) + bytes(400), "add up"),
        (struct.pack("<BBBBI4I", 1, 4, 0, 0, 400, 100, 100, 100, 99) + bytes(400), "add up"),
        (struct.pack("<BBBBI4I", 1, 4, 0, 0, 400, 99, 100, 100, 100) + bytes(399), "decodes to None"),
    ],
)
def test_a_malformed_block_is_named(stored: bytes, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        _decode(stored, 400)


def test_a_frame_that_claims_another_length_is_refused_before_it_is_decoded() -> None:
    frame = bytes(numcodecs.zstd.Zstd().encode(bytes(1 << 26)))
    assert zstd_content_bytes(memoryview(frame)) == 1 << 26
    stored = struct.pack("<BBBBI1I", 1, 1, 0, 0, 1 << 20, len(frame)) + frame
    with pytest.raises(IntegrityError, match=f"decodes to {1 << 26} bytes instead of {1 << 20}"):
        _decode(stored, 1 << 20)
