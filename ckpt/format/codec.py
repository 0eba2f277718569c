"""Choose a codec for each block, encode and decode. Codecs are numcodecs configurations, lossless ones only.

`auto` compresses where that costs almost nothing: where one core encodes at least four times as fast as the store accepts
bytes, so that training is not slowed down. Both speeds are measured during saves.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ckpt.errors import FormatError
from ckpt.format import bounded_decode
from ckpt.state.leaves.base import Bytes
from ckpt.state.name_patterns import matcher
from ckpt.storage.base.errors import InvalidArgument

_SAFE_CODEC_IDS = {"blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "lzma", "shuffle", "float_planes"}
"""Lossless codecs from bytes to bytes that do not run code from the data (as `pickle` would)."""

Codec = Any
CodecOption = Codec | str | Mapping[str, Codec | str | None] | None

_CANDIDATES: tuple[dict[str, Any], ...] = (
    {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
    {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 0},
)
_SAMPLE_BYTES = 1 << 20
_MIN_SPEED_RATIO = 4.0  # a codec this many times as fast as the store costs the training almost nothing
_MIN_MEASURED_SECONDS = 2.0
"""Seconds of writing before a codec is considered. A save to a fast store ends before that and never imports numcodecs, which
would cost each rank 0.1 s."""

_MAX_STORED_FRACTION = 0.95  # above this fraction of the raw bytes, the saving does not justify decoding on every load


@lru_cache(maxsize=64)
def codec_of(config: str) -> Codec:
    """Return the codec of a configuration in JSON; raise FormatError for one that is not allowed or not valid."""
    import numcodecs

    try:
        parsed = json.loads(config)
        if parsed["id"] not in _SAFE_CODEC_IDS:
            raise FormatError(
                f"codec {parsed['id']!r} is not used for checkpoints; use one of {', '.join(sorted(_SAFE_CODEC_IDS))}"
            )
        if parsed["id"] == "float_planes":
            import ckpt.format.float_planes  # noqa: F401  # registers it
        return numcodecs.get_codec(parsed)
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"codec configuration {config[:200]!r} is not understood: {error}") from error


def parse_option(option: CodecOption) -> Callable[[str], str | None]:
    """Return a function from a leaf name to its codec: `auto`, None, or a configuration in JSON.

    option: "auto", "none", None, a numcodecs codec or its configuration, or a mapping from name patterns to those. The first
        pattern that matches a leaf counts; a leaf that no pattern matches gets "auto".

    Raises InvalidArgument or FormatError for an option that cannot be used.
    """
    if isinstance(option, Mapping) and "id" not in option:
        if not option:
            raise InvalidArgument("codec={}: use 'auto', 'none', a numcodecs configuration, or {pattern: one of these}")
        for pattern in option:
            if not isinstance(pattern, str):
                raise InvalidArgument(f"codec: {pattern!r} is not a pattern of leaf names: use a str, such as 'model.*'")
        rules = [(matcher(pattern), _parse_one(w)) for pattern, w in option.items()]
        return lambda name: next((w for match, w in rules if match(name)), "auto")
    only = _parse_one(option)
    return lambda _: only


def _parse_one(option: Any) -> str | None:
    if option is None or option == "none":
        return None
    if option == "auto":
        return "auto"
    if not isinstance(option, Mapping):
        get_config = getattr(option, "get_config", None)
        if get_config is None:
            raise FormatError(
                f"codec {option!r} is not understood; use 'auto', 'none', a numcodecs codec or its configuration, "
                "or a mapping of leaf patterns to those"
            )
        option = get_config()
    try:
        config = json.dumps(option, sort_keys=True)
    except TypeError as error:
        raise FormatError(f"codec configuration {option!r} is not understood: {error}") from error
    sample = np.zeros(64, np.uint8)
    encoded = encode(config, sample, 8)  # raises here for a level or a name that the codec refuses
    try:
        decode(config, encoded, np.empty_like(sample))  # a codec that a load would refuse must not be written
    except MemoryError:
        raise
    except Exception as error:  # codecs raise errors of any type
        raise FormatError(f"codec configuration {config[:200]} encodes data that it cannot decode: {error}") from error
    return config


def encode(config: str, raw: Bytes, itemsize: int) -> memoryview:
    """Return the encoded bytes; raise FormatError where the codec fails.

    config: the codec, in JSON. itemsize: bytes of one element, for codecs that shuffle bytes.
    """
    made = codec_of(config)
    data: Any = raw
    if itemsize in (2, 4, 8) and len(raw) % itemsize == 0:
        data = raw.view(f"u{itemsize}")
    try:
        encoded = made.encode(data)
    except MemoryError:
        raise
    except Exception as error:  # codecs raise errors of any type
        raise FormatError(f"codec configuration {config[:200]} is not understood: {error}") from error
    return encoded.view(np.uint8).data if isinstance(encoded, np.ndarray) else memoryview(encoded).cast("B")


def decode(config: str, stored: memoryview, out: Bytes) -> None:
    """Decode into `out`; raise IntegrityError if the result has another length. Memory is allocated for that length only."""
    bounded_decode.decode(codec_of(config), json.loads(config), stored, out)


# --- auto ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CodecMeasurement:
    """One codec on one kind of data."""

    config: str
    ratio: float
    bytes_per_second: float


def choose_codec(store_bytes_per_second: float, measured: list[CodecMeasurement]) -> str | None:
    """Return the codec with the best ratio that is fast enough for the store, None if no codec is. Pure."""
    fit = [
        m
        for m in measured
        if m.bytes_per_second >= _MIN_SPEED_RATIO * store_bytes_per_second and m.ratio <= _MAX_STORED_FRACTION
    ]
    return min(fit, key=lambda m: m.ratio).config if fit else None


class CodecTuner:
    """Measurements of one store and of the data saved to it, shared by all threads of all saves to that store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_since = 0.0
        self._writer_count = 0
        self._busy_seconds = 0.0
        self._written_bytes = 0
        self._measured: dict[str, list[CodecMeasurement]] = {}

    def write_began(self) -> None:
        """Record that a thread started to write to the store."""
        with self._lock:
            if not self._writer_count:
                self._busy_since = time.monotonic()
            self._writer_count += 1

    def write_ended(self, nbytes: int) -> None:
        """Record that a thread has written `nbytes` bytes."""
        with self._lock:
            self._writer_count -= 1
            now = time.monotonic()
            self._busy_seconds += now - self._busy_since
            self._busy_since = now
            self._written_bytes += nbytes
            if self._busy_seconds > 20:  # older measurements lose weight, since the speed of a store changes over hours
                self._busy_seconds, self._written_bytes = self._busy_seconds / 2, self._written_bytes // 2

    def store_bytes_per_second(self) -> float | None:
        """Return the speed of the store in bytes per second, None until enough was written to measure it."""
        with self._lock:
            if self._busy_seconds < _MIN_MEASURED_SECONDS:
                return None
            return self._written_bytes / max(self._busy_seconds, 1e-9)

    def pick(self, dtype: str, raw: Bytes, itemsize: int) -> str | None:
        """Return the codec for a block of elements of type `dtype`, None for no codec."""
        speed = self.store_bytes_per_second()
        if speed is None or speed > 2e9:  # no candidate is four times as fast as that
            return None
        measured = self._measured.get(dtype)
        if measured is None:
            measured = self._measured[dtype] = [_measure(c, raw[:_SAMPLE_BYTES], itemsize) for c in _CANDIDATES]
        return choose_codec(speed, measured)


def _measure(config: dict[str, Any], sample: Bytes, itemsize: int) -> CodecMeasurement:
    text = json.dumps(config, sort_keys=True)
    encode(text, sample[:4096], itemsize)  # the first call initialises the library, and is not measured
    began = time.perf_counter()
    encoded = encode(text, sample, itemsize)
    seconds = time.perf_counter() - began
    return CodecMeasurement(text, len(encoded) / max(1, len(sample)), len(sample) / max(seconds, 1e-9))


_tuners: dict[str, CodecTuner] = {}


def codec_tuner(store_url: str) -> CodecTuner:
    """Return the tuner of a store. Stores with the same scheme and host share one, since they have the same speed."""
    scheme, _, rest = store_url.partition("://")
    key = scheme if scheme == "file" else f"{scheme}://{rest.partition('/')[0]}"
    return _tuners.setdefault(key, CodecTuner())
