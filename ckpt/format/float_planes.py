"""The numcodecs codec `float_planes`: byte planes of numbers, each stored as it is or as a Zstandard frame of literals.

In weights and moments of training, only the exponents of the floats are compressible: the low bytes are noise. So byte k of
all elements becomes plane k, and a plane is compressed only if a sample of it shrinks. A search for repeated strings does not
help on exponents, so the frames consist of Huffman-coded literals, which the package `zstandard` can request. Without it,
numcodecs writes the frames: slower, and a little larger. Every reader of Zstandard reads both. docs/reference/format.md has the
layout.
"""

from __future__ import annotations

import importlib
import struct
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import numpy as np
from numcodecs.abc import Codec
from numcodecs.compat import ensure_contiguous_ndarray
from numcodecs.registry import register_codec
from numcodecs.zstd import Zstd

from ckpt.format.bounded_decode import memory_errors_raised, zstd_content_bytes
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.errors import IntegrityError

_VERSION = 1
_HEADER = struct.Struct("<BBBBI")
_ITEM_SIZES = (1, 2, 4, 8)
_SAMPLE_PARTS, _PART_ELEMENTS = 16, 1024
_MAX_PLANE_FRACTION = 0.99
"""A plane of whose sample a larger fraction remains is stored as it is. In other planes, Zstandard stores parts that do not
shrink as they are, so it is enough if one of several arrays in a block shrinks."""

_CHUNK_ELEMENTS = 1 << 17
"""Elements that are split at a time: they and their planes fit into the processor's second cache."""

_Compress = Callable[[Any], bytes]
Words = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


class FloatPlanes(Codec):  # type: ignore[misc]  # numcodecs has no types
    """The codec `float_planes`, which is lossless.

    The type of the encoded buffer gives the size of an element: 1, 2, 4 or 8 bytes. Elements of other sizes count as bytes.
    """

    codec_id = "float_planes"

    def encode(self, buf: Any) -> Bytes:
        """Return the encoded bytes of an array or buffer."""
        array = ensure_contiguous_ndarray(buf)
        itemsize = array.dtype.itemsize if array.dtype.itemsize in _ITEM_SIZES else 1
        raw = array.reshape(-1).view(np.uint8)
        count = len(raw) // itemsize
        elements = raw[: count * itemsize].view(f"u{itemsize}")
        joined, shrinks = _choose_form(elements)
        start = _HEADER.size + 4 * itemsize
        out = np.empty(start + len(raw), np.uint8)
        # The low planes are rarely compressed. Those before the first compressed plane are written to their final place.
        in_place = shrinks.index(True) if True in shrinks else itemsize
        planes = [*_rows(out[start:], in_place, count), *_rows(_scratch(itemsize * count), itemsize - in_place, count)]
        _split(elements, joined, planes)
        at = start
        lengths: list[int] = []
        for plane, shrinks_plane in zip(planes, shrinks, strict=True):
            stored = plane
            if shrinks_plane:
                frame = np.frombuffer(_compressor()(plane), np.uint8)
                stored = frame if len(frame) < count else plane
            if len(lengths) >= in_place:
                out[at : at + len(stored)] = stored
            at += len(stored)
            lengths.append(len(stored))
        tail = raw[count * itemsize :]
        out[at : at + len(tail)] = tail
        header = _HEADER.pack(_VERSION, itemsize, joined, 0, len(raw)) + struct.pack(f"<{itemsize}I", *lengths)
        out[:start] = np.frombuffer(header, np.uint8)
        return out[: at + len(tail)]

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the decoded bytes, in `out` if it is given; raise IntegrityError for bytes of another form.

        Memory is allocated for as many bytes as `out` has, or as the header states if `out` is None.
        """
        stored = ensure_contiguous_ndarray(buf).reshape(-1).view(np.uint8)
        itemsize, joined, nbytes, lengths = _parse_header(stored)
        target = np.empty(nbytes, np.uint8) if out is None else ensure_contiguous_ndarray(out).reshape(-1).view(np.uint8)
        if len(target) != nbytes:
            raise IntegrityError(f"the block decodes to {nbytes} bytes instead of {len(target)}")
        count = nbytes // itemsize
        at = _HEADER.size + 4 * itemsize
        planes: list[Bytes] = []
        for length, row in zip(lengths, _rows(_scratch(itemsize * count), itemsize, count), strict=True):
            part = stored[at : at + length]
            if length < count:
                _decompress(part, row)
            planes.append(part if length == count else row)
            at += length
        _merge(planes, joined, target[: count * itemsize].view(f"u{itemsize}"))
        target[count * itemsize :] = stored[at:]
        return target if out is None else out


def _parse_header(stored: Bytes) -> tuple[int, bool, int, tuple[int, ...]]:
    """Return the element size, whether the exponents are joined, the decoded length and the stored length of each plane."""
    try:
        version, itemsize, joined, _, nbytes = _HEADER.unpack(stored[: _HEADER.size].tobytes())
        if version != _VERSION or itemsize not in _ITEM_SIZES or joined not in (0, itemsize > 1):
            raise IntegrityError(f"a block of float_planes begins with {stored[:4].tobytes().hex()}, which is not a known form")
        start = _HEADER.size + 4 * itemsize
        lengths = struct.unpack(f"<{itemsize}I", stored[_HEADER.size : start].tobytes())
    except struct.error:
        raise IntegrityError(f"a block of float_planes ends after {len(stored)} bytes, in its header") from None
    if any(length > nbytes // itemsize for length in lengths) or start + sum(lengths) + nbytes % itemsize != len(stored):
        raise IntegrityError(f"the lengths in a block of float_planes do not add up to its {len(stored)} bytes")
    return itemsize, bool(joined), nbytes, lengths


# --- planes ----------------------------------------------------------------------------------------------------


def _split(elements: Words, joined: bool, planes: list[Bytes]) -> None:
    """Write plane k, which is byte k of each element counted from the least significant one.

    joined: whether the eight bits after the sign, which are the exponent of bfloat16 and float32, become the last plane. The
        sign then takes the place of the exponent's last bit in the plane before.
    """
    bits = 8 * elements.itemsize
    shifted, rest = (np.empty(_CHUNK_ELEMENTS, elements.dtype) for _ in range(2))
    for at in range(0, len(elements), _CHUNK_ELEMENTS):
        chunk = elements[at : at + _CHUNK_ELEMENTS]
        word, low = shifted[: len(chunk)], rest[: len(chunk)]
        for k, plane in enumerate(planes):
            from_top = len(planes) - k if joined else 0
            if from_top == 1:
                np.right_shift(chunk, bits - 9, out=word)
            elif from_top == 2:
                np.right_shift(chunk, bits - 8, out=word)
                np.bitwise_and(word, 0x80, out=word)
                np.right_shift(chunk, bits - 16, out=low)
                np.bitwise_and(low, 0x7F, out=low)
                np.bitwise_or(word, low, out=word)
            else:
                np.right_shift(chunk, 8 * k, out=word)
            np.copyto(plane[at : at + len(chunk)], word, casting="unsafe")  # keeps the low byte


def _merge(planes: list[Bytes], joined: bool, elements: Words) -> None:
    """Write the elements of these planes, the reverse of `_split`."""
    bits = 8 * elements.itemsize
    buffer = np.empty(_CHUNK_ELEMENTS, elements.dtype)
    signs = np.empty(_CHUNK_ELEMENTS, np.uint8)
    for at in range(0, len(elements), _CHUNK_ELEMENTS):
        chunk = elements[at : at + _CHUNK_ELEMENTS]
        word, byte = buffer[: len(chunk)], signs[: len(chunk)]
        np.copyto(chunk, planes[0][at : at + len(chunk)])
        if joined and len(planes) == 2:
            np.bitwise_and(chunk, 0x7F, out=chunk)
        for k in range(1, len(planes)):
            plane = planes[k][at : at + len(chunk)]
            shift = 8 * k
            if joined and k == len(planes) - 1:
                shift = bits - 9
            elif joined and k == len(planes) - 2:
                plane = np.bitwise_and(plane, 0x7F, out=byte)
            np.copyto(word, plane)
            np.left_shift(word, shift, out=word)
            np.bitwise_or(chunk, word, out=chunk)
        if joined:
            np.bitwise_and(planes[-2][at : at + len(chunk)], 0x80, out=byte)
            np.copyto(word, byte)
            np.left_shift(word, bits - 8, out=word)
            np.bitwise_or(chunk, word, out=chunk)


def _choose_form(elements: Words) -> tuple[bool, list[bool]]:
    """Return whether joined exponents shrink a sample more, and for each plane whether it is worth compressing."""
    sample = elements
    if len(elements) > _SAMPLE_PARTS * _PART_ELEMENTS:
        starts = np.linspace(0, len(elements) - _PART_ELEMENTS, _SAMPLE_PARTS).astype(int)
        sample = np.concatenate([elements[start : start + _PART_ELEMENTS] for start in starts])
    forms = [_plane_sizes(sample, joined) for joined in ((False, True) if elements.itemsize > 1 else (False,))]
    best = min(forms, key=sum)
    return best is not forms[0], [size <= _MAX_PLANE_FRACTION * len(sample) for size in best]


def _plane_sizes(sample: Words, joined: bool) -> list[int]:
    planes = [np.empty(len(sample), np.uint8) for _ in range(sample.itemsize)]
    _split(sample, joined, planes)
    return [min(len(_compressor()(plane)), len(plane)) for plane in planes]


def _rows(buffer: Bytes, number: int, count: int) -> list[Bytes]:
    return [buffer[k * count : (k + 1) * count] for k in range(number)]


# --- frames ----------------------------------------------------------------------------------------------------

_local = threading.local()
"""Of each thread: `compress`, since a compressor of `zstandard` may not be used by two threads at once, and `scratch`."""


def _scratch(nbytes: int) -> Bytes:
    """Return memory that the next call of this thread reuses: fresh pages would cost a third of the time of a block."""
    found = getattr(_local, "scratch", None)
    if found is None or len(found) < nbytes:
        found = _local.scratch = np.empty(nbytes, np.uint8)
    return cast(Bytes, found)


def _compressor() -> _Compress:
    found = getattr(_local, "compress", None)
    if found is None:
        found = _local.compress = _new_compressor()
    return cast(_Compress, found)


def _new_compressor() -> _Compress:
    zstandard = _zstandard()
    if zstandard is None:
        return cast(_Compress, Zstd(level=1).encode)
    # The smallest hash table and the longest minimal match: almost no match is found, so the search skips most positions.
    # A window as long as a block of the format keeps the block in the processor's cache.
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17,
        target_length=0, write_content_size=True, write_checksum=False,
    )  # fmt: skip
    return cast(_Compress, zstandard.ZstdCompressor(compression_params=parameters).compress)


def _zstandard() -> ModuleType | None:
    """Return the package if it is installed. A failure is not cached, because it may be temporary."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


def _decompress(frame: Bytes, plane: Bytes) -> None:
    claimed = zstd_content_bytes(frame.data)
    if claimed != len(plane):
        raise IntegrityError(f"a plane of a block decodes to {claimed} bytes instead of {len(plane)}")
    try:
        with memory_errors_raised():
            Zstd().decode(frame, plane)
    except RuntimeError as error:
        raise IntegrityError(f"a plane of a block is not a frame of Zstandard: {error}") from error


register_codec(FloatPlanes)
