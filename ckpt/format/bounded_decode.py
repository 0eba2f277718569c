"""Decode a block with a limit on memory: no result is longer than the length that the manifest states.

A few stored bytes can claim, or decode to, any length. So each codec stops at the stated length, or its header is compared
with that length before the codec allocates. The stored bytes are not trusted: their checksum only detects accidental changes.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.errors import IntegrityError

if TYPE_CHECKING:
    from numcodecs.abc import Codec

MAX_LZMA_BYTES = 256 << 20
"""The most memory that an LZMA decoder may use. The strongest preset of the format needs 65 MiB."""

_GZIP_WINDOW_BITS = 31
"""The window bits by which zlib expects a gzip header and the largest window."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def decode(codec: Codec, config: dict[str, Any], stored: memoryview, out: Bytes) -> None:
    """Decode `stored` with `codec` into `out`, which has the length that the manifest states.

    config: the configuration of `codec`.

    Raises IntegrityError if the result has another length than `out`, and any error of the codec where bytes are damaged.
    """
    decoder = _DECODERS.get(config["id"])
    if decoder is not None:
        _fill(out, decoder(config, stored, len(out)))
        return
    claimed = _CLAIMED_BYTES[config["id"]](stored)
    if claimed != len(out):
        raise _length_error(claimed, len(out))
    with memory_errors_raised():
        decoded = codec.decode(stored, out)
    if decoded is not out:
        _fill(out, memoryview(decoded).cast("B"))


@contextmanager
def memory_errors_raised() -> Iterator[None]:
    """Raise MemoryError if the Zstandard of numcodecs gets no memory: its RuntimeError looks like that of damaged bytes."""
    try:
        yield
    except RuntimeError as error:
        if "not enough memory" not in str(error):
            raise
        raise MemoryError(str(error)) from error


def inflate(data: bytes, limit: int) -> bytes:
    """Return the decoded bytes of zlib data; raise ValueError if they are malformed or decode to more than `limit` bytes."""
    stream = zlib.decompressobj()
    try:
        decoded = stream.decompress(data, limit)
    except zlib.error as error:
        raise ValueError(f"not zlib data: {error}") from error
    if not stream.eof and (stream.unconsumed_tail or len(decoded) >= limit):
        raise ValueError(f"decodes to more than {limit} bytes")
    if not stream.eof:
        raise ValueError("the zlib data end early")
    return decoded


def _fill(out: Bytes, decoded: bytes | memoryview) -> None:
    if len(decoded) != len(out):
        raise _length_error(len(decoded), len(out))
    got = np.frombuffer(decoded, np.uint8)
    if got.ctypes.data != out.ctypes.data:
        out[:] = got


def _length_error(found: int | None, stated: int) -> IntegrityError:
    what = "an unknown number of" if found is None else f"at least {found}" if found > stated else f"{found}"
    return IntegrityError(f"the block decodes to {what} bytes, and the manifest states {stated}")


# --- codecs that stop at a length. They may decode one byte more than stated, to detect a result that is too long -------------


def _decode_zlib(_: object, stored: memoryview, nbytes: int) -> bytes:
    return zlib.decompressobj().decompress(stored, nbytes + 1)


def _decode_gzip(_: object, stored: memoryview, nbytes: int) -> bytes:
    return zlib.decompressobj(_GZIP_WINDOW_BITS).decompress(stored, nbytes + 1)


def _decode_bz2(_: object, stored: memoryview, nbytes: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(stored, nbytes + 1)


def _decode_lzma(config: dict[str, Any], stored: memoryview, nbytes: int) -> bytes:
    form, filters = config.get("format", lzma.FORMAT_XZ), config.get("filters")
    if form != lzma.FORMAT_RAW:
        return lzma.LZMADecompressor(form, MAX_LZMA_BYTES).decompress(stored, nbytes + 1)
    if sum(int(f.get("dict_size", 0)) for f in filters or ()) > MAX_LZMA_BYTES:
        raise IntegrityError(
            f"LZMA filters with a dictionary of more than {MAX_LZMA_BYTES} bytes are refused; load another step"
        )
    return lzma.LZMADecompressor(form, None, filters).decompress(stored, nbytes + 1)


_DECODERS: dict[str, Callable[[dict[str, Any], memoryview, int], bytes]] = {
    "zlib": _decode_zlib, "gzip": _decode_gzip, "bz2": _decode_bz2, "lzma": _decode_lzma,
}  # fmt: skip


# --- codecs that decode into `out`: the length that their header claims -------------------------------------------------


def _blosc_claim(stored: memoryview) -> int | None:
    if len(stored) < 16:
        return None
    nbytes, block = int.from_bytes(stored[4:8], "little"), int.from_bytes(stored[8:12], "little")
    return nbytes if block <= max(nbytes, 1) else None  # blosc allocates three times its inner block size


def _lz4_claim(stored: memoryview) -> int | None:
    return int.from_bytes(stored[:4], "little") if len(stored) >= 4 else None


def _float_planes_claim(stored: memoryview) -> int | None:
    return int.from_bytes(stored[4:8], "little") if len(stored) >= 8 else None


def zstd_content_bytes(stored: memoryview) -> int | None:
    """Return the content size of the first frame; None if the header does not state it. RFC 8878, section 3.1.1.1."""
    if len(stored) < 6 or stored[:4] != _ZSTD_MAGIC:
        return None
    descriptor = stored[4]
    is_single_segment, size_flag = descriptor >> 5 & 1, descriptor >> 6
    size_bytes = (is_single_segment, 2, 4, 8)[size_flag]
    position = 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if not size_bytes or len(stored) < position + size_bytes:
        return None
    return int.from_bytes(stored[position : position + size_bytes], "little") + (256 if size_bytes == 2 else 0)


_CLAIMED_BYTES: dict[str, Callable[[memoryview], int | None]] = {
    "blosc": _blosc_claim,
    "lz4": _lz4_claim,
    "zstd": zstd_content_bytes,
    "shuffle": len,
    "float_planes": _float_planes_claim,
}
