"""Checksums. xxh3 runs at memory speed (33 GB/s a core), so everything is summed; blake3 for whole blocks on request."""

from __future__ import annotations

from typing import Any

import xxhash

from ckpt.errors import FormatError
from ckpt.storage.base import checksums
from ckpt.storage.base.errors import InvalidArgument

CELL_BYTES = checksums.CELL_BYTES
"""An uncompressed block keeps a checksum of each such part, so that a part can be read alone and still be verified."""

checksum = checksums.checksum


def digest(algorithm: str, data: Any) -> bytes:
    """Digest of `data`: 16 bytes for xxh3-128, 32 for blake3."""
    if algorithm == "xxh3-128":
        return xxhash.xxh3_128_digest(data)
    return _blake3()(data).digest()  # type: ignore[no-any-return]


def hasher(algorithm: str) -> Any:
    """An object with update() and digest()."""
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else _blake3()()


def is_cryptographic(algorithm: str) -> bool:
    """Whether nobody can find other bytes with the same digest. xxh3 only finds what changed by accident."""
    return algorithm == "blake3"


def algorithm_of_hex(text: str | None) -> str:
    """The algorithm of a digest in a record, by its length."""
    return "blake3" if text is not None and len(text) == 64 else "xxh3-128"


def choose_algorithm(option: str, signed: bool) -> str:
    """The algorithm that a user wishes; "auto" is the fast one, and the cryptographic one where steps are signed."""
    if signed and option == "xxh3-128":
        raise InvalidArgument(
            "digest='xxh3-128' with a key: a signature only protects what it names by digests that nobody can forge; use "
            "digest='auto' or 'blake3'"
        )
    if option == "auto":
        option = "blake3" if signed else "xxh3-128"
    return require_algorithm(option)


def require_algorithm(algorithm: str) -> str:
    """Return `algorithm` if it can be computed here."""
    if algorithm == "blake3":
        _blake3()
    elif algorithm != "xxh3-128":
        raise FormatError(f"unknown digest {algorithm!r}: use 'auto', 'xxh3-128' or 'blake3'")
    return algorithm


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise FormatError('blake3 digests need a package: pip install "ckpt-store[blake3]"') from error
    return blake3


def digest_and_cells(algorithm: str, data: memoryview) -> tuple[bytes, bytes]:
    """Digest of `data`, and the checksums of its cells, 8 bytes each, little-endian; one pass through memory."""
    whole = hasher(algorithm)
    cells = []
    for start in range(0, len(data), CELL_BYTES):  # both, while the cell is in the second-level cache
        cell = data[start : start + CELL_BYTES]
        whole.update(cell)
        cells.append(checksum(cell))
    return whole.digest(), checksums.pack_checksums(cells)
