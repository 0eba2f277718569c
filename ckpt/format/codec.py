"""Parse the option `codec=`, encode and decode blocks. Codecs are numcodecs configurations, lossless ones only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import FormatError
from ckpt.format import bounded_decode
from ckpt.state.leaves.base import Bytes
from ckpt.state.name_patterns import matcher
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import InvalidArgument, is_transient

_SAFE_CODEC_IDS = {"blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "lzma", "shuffle", "float_planes"}
"""Lossless codecs from bytes to bytes that do not run code from the data (as `pickle` would)."""

_CODEC_ADVICE = "use 'auto', 'none', a numcodecs codec or its configuration, or a mapping of leaf patterns to those"

Codec = Any
CodecOption = Codec | str | Mapping[str, Codec | str | None] | None


@lru_cache(maxsize=64)
def codec_of(config: str) -> Codec:
    """Return the codec of a configuration in JSON; raise FormatError for one that is not allowed or not valid."""
    import numcodecs

    try:
        parsed = parse_json(config)
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
        if is_transient(error):
            raise
        raise FormatError(f"codec configuration {config[:200]!r} is not understood ({error}); {_CODEC_ADVICE}") from error


def parse_option(option: CodecOption) -> Callable[[str], str | None]:
    """Return a function from a leaf name to its codec: `auto`, None, or a configuration in JSON.

    option: "auto", "none", None, a numcodecs codec or its configuration, or a mapping from name patterns to those. The first
        pattern that matches a leaf counts; a leaf that no pattern matches gets "auto".

    Raises InvalidArgument for an option that cannot be used.
    """
    if isinstance(option, Mapping) and "id" not in option:
        if not option:
            raise InvalidArgument("codec={}: use 'auto', 'none', a numcodecs configuration, or {pattern: one of these}")
        for pattern in option:
            if not isinstance(pattern, str):
                raise InvalidArgument(f"codec: {pattern!r} is not a pattern of leaf names: use a str, such as 'model.*'")
        rules = [(matcher(pattern), _parse_one(choice)) for pattern, choice in option.items()]
        return lambda name: next((choice for match, choice in rules if match(name)), "auto")
    only = _parse_one(option)
    return lambda _: only


def _parse_one(option: object) -> str | None:
    if option is None or option == "none":
        return None
    if option == "auto":
        return "auto"
    if not isinstance(option, Mapping):
        get_config = getattr(option, "get_config", None)
        if get_config is None:
            raise InvalidArgument(f"codec {option!r} is not understood; {_CODEC_ADVICE}")
        option = get_config()
    try:
        config = json.dumps(option, sort_keys=True)
    except TypeError as error:
        raise InvalidArgument(f"codec configuration {option!r} is not understood ({error}); {_CODEC_ADVICE}") from error
    sample = np.zeros(64, np.uint8)
    try:
        encoded = encode(config, sample, 8)  # raises here for a level or a name that the codec refuses
    except FormatError as error:
        raise InvalidArgument(str(error)) from error
    try:
        decode(config, encoded, np.empty_like(sample))  # a codec that a load would refuse must not be written
    except Exception as error:  # codecs raise errors of any type
        if is_transient(error):
            raise
        raise InvalidArgument(
            f"codec configuration {config[:200]} encodes data that it cannot decode ({error}); change its parameters, or use "
            "another codec"
        ) from error
    return config


def encode(config: str, raw: Bytes, itemsize: int) -> memoryview:
    """Return the encoded bytes; raise FormatError if the codec fails.

    config: the codec, in JSON. itemsize: bytes of one element, for codecs that shuffle bytes.
    """
    made = codec_of(config)
    data: npt.NDArray[Any] = raw
    if itemsize in (2, 4, 8) and len(raw) % itemsize == 0:
        data = raw.view(f"u{itemsize}")
    try:
        with bounded_decode.memory_errors_raised():
            encoded = made.encode(data)
    except Exception as error:  # codecs raise errors of any type
        if is_transient(error):
            raise
        raise FormatError(
            f"codec configuration {config[:200]} can't encode ({error}); change its parameters, or use another codec"
        ) from error
    return encoded.view(np.uint8).data if isinstance(encoded, np.ndarray) else memoryview(encoded).cast("B")


def decode(config: str, stored: memoryview, out: Bytes) -> None:
    """Decode `stored` into `out`, with memory for the length of `out` only.

    config: the codec, in JSON.

    Raises FormatError for a codec that is not allowed or not valid, IntegrityError if the result has another length than `out`,
    and any error of the codec where bytes are damaged.
    """
    bounded_decode.decode(codec_of(config), json.loads(config), stored, out)
