"""Digests of blocks and checksums of their cells: xxh3, which runs at memory speed (25.8 GB/s a core), or blake3."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import xxhash

from ckpt.errors import FormatError
from ckpt.storage.base.checksums import CELL_BYTES as CELL_BYTES
from ckpt.storage.base.checksums import checksum as checksum
from ckpt.storage.base.checksums import pack_checksums
from ckpt.storage.base.errors import InvalidArgument

if TYPE_CHECKING:
    from ckpt.state.leaves.base import Bytes
    from ckpt.storage.base.store import Buffer


def digest(algorithm: str, data: Buffer | Bytes) -> bytes:
    """Return the digest of any buffer: 16 bytes for xxh3-128, 32 for blake3; raise FormatError if blake3 is not installed."""
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]  # an array is a buffer for mypy from Python 3.12 on
    return _blake3()(data).digest()


class Hasher(Protocol):
    """A digest of bytes that arrive in parts, as in `hashlib`."""

    def update(self, data: Buffer | Bytes, /) -> object: ...
    def digest(self) -> bytes: ...


def hasher(algorithm: str) -> Hasher:
    """Return a new hash object; raise FormatError for blake3 if its package is not installed."""
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else _blake3()()  # type: ignore[return-value]


def is_cryptographic(algorithm: str) -> bool:
    """Return whether nobody can compute other bytes with the same digest. xxh3 detects accidental changes only."""
    return algorithm == "blake3"


def algorithm_of_hex(text: str | None) -> str:
    """Return the algorithm of a digest in a record, from its length: 64 digits are blake3."""
    return "blake3" if text is not None and len(text) == 64 else "xxh3-128"


def choose_algorithm(option: str, signed: bool) -> str:
    """Return the algorithm of a `digest=` option; "auto" is the fast one, or the cryptographic one if steps are signed.

    Raises InvalidArgument for an unknown algorithm, for one whose package is not installed, and for xxh3-128 with signed steps.
    """
    if signed and option == "xxh3-128":
        raise InvalidArgument(
            "digest='xxh3-128' with a key: a signature protects blocks only by digests that nobody can forge; use "
            "digest='auto' or 'blake3'"
        )
    if option == "auto":
        option = "blake3" if signed else "xxh3-128"
    return require_algorithm(option)


def require_algorithm(algorithm: str) -> str:
    """Return `algorithm`; raise InvalidArgument if it is unknown or its package is not installed."""
    if algorithm not in ("xxh3-128", "blake3"):
        raise InvalidArgument(f"unknown digest {algorithm!r}: use 'auto', 'xxh3-128' or 'blake3'")
    if algorithm == "blake3":
        try:
            _blake3()
        except FormatError as error:
            raise InvalidArgument(str(error)) from error
    return algorithm


def _blake3() -> Callable[..., Hasher]:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise FormatError('blake3 digests need a package: pip install "ckpt-store[blake3]"') from error
    return blake3  # type: ignore[return-value]


def digest_and_cells(algorithm: str, data: memoryview) -> tuple[bytes, bytes]:
    """Return the digest of `data` and the checksums of its cells, 8 bytes each, little-endian, in one pass through memory."""
    whole = hasher(algorithm)
    cells = []
    for start in range(0, len(data), CELL_BYTES):  # compute both while the cell is in the second-level cache
        cell = data[start : start + CELL_BYTES]
        whole.update(cell)
        cells.append(checksum(cell))
    return whole.digest(), pack_checksums(cells)
