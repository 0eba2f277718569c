"""Check the stored bytes of a block against its digest and checksum, in memory or in a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import xxhash

from ckpt.block_io.staging_arena import round_up
from ckpt.format import codec
from ckpt.format.digest import checksum, digest, hasher, is_cryptographic
from ckpt.format.limits import MAX_BLOCK_BYTES
from ckpt.storage.base.checksums import CELL_BYTES
from ckpt.storage.base.errors import IntegrityError, is_transient
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import Store

_CHUNK_BYTES = 4 * CELL_BYTES
"""Bytes that are read and hashed at once."""


class StatedBlock(Protocol):
    """The fields of a block that its manifest states; `Row` and `StoredBlock` have them."""

    @property
    def position(self) -> int: ...
    @property
    def stored(self) -> int: ...
    @property
    def raw(self) -> int: ...
    @property
    def codec(self) -> str | None: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def checksum(self) -> int | None: ...


def is_good_block(algorithm: str, block: StatedBlock, stored: memoryview) -> bool:
    """Return whether `stored` are the stored bytes of a block.

    With a codec, the checksum of the stored bytes detects accidental changes; a cryptographic digest is also compared with the
    decoded bytes.

    algorithm: that of `block.digest`.
    """
    if block.codec is None:
        return digest(algorithm, stored) == block.digest
    return checksum(stored) == block.checksum and (
        not is_cryptographic(algorithm) or _decodes_to_digest(algorithm, block, stored)
    )


def _decodes_to_digest(algorithm: str, block: StatedBlock, stored: memoryview) -> bool:
    assert block.codec is not None
    if block.raw > MAX_BLOCK_BYTES:
        return False
    raw = np.empty(block.raw, np.uint8)
    try:
        codec.decode(block.codec, stored, raw)
    except ImportError:
        raise
    except Exception as error:  # codecs raise errors of any type
        if is_transient(error):
            raise
        return False
    return digest(algorithm, raw) == block.digest


def verify_stored_block(
    store: Store, name: str, algorithm: str, block: StatedBlock, compute_slot: Callable[[], AbstractContextManager[object]]
) -> None:
    """Read a block past the page cache and check it.

    name: the pack. compute_slot: a context that is entered while this computes and does not wait for the store.

    Raises IntegrityError if the block is not as it was written, and StoreError if the store fails.
    """
    where = f"{store.url}/{name}, block at byte {block.position},"
    at_once = block.codec is not None and is_cryptographic(algorithm)  # the digest is that of the decoded bytes
    if at_once and block.stored > MAX_BLOCK_BYTES:
        raise IntegrityError(f"{where} has {block.stored} bytes, and blocks have at most {MAX_BLOCK_BYTES}")
    # Each call to a remote store costs a round trip, so read the whole block in one call.
    chunk_bytes = _CHUNK_BYTES if store.past_cache and not at_once else max(1, min(block.stored, MAX_BLOCK_BYTES))
    memory = np.frombuffer(map_huge_pages(min(round_up(chunk_bytes), round_up(block.stored))), np.uint8)
    sums: Any = xxhash.xxh3_64() if block.codec is not None else hasher(algorithm)
    done = 0
    with store.open_once(name) as reader:
        while done < block.stored:
            expected = min(chunk_bytes, block.stored - done)
            # Only whole pages can bypass the page cache; packs consist of whole pages.
            count = reader.read_into(block.position + done, memory[: round_up(expected)].data)
            if count < expected:
                raise IntegrityError(f"{where} ends {block.stored - done - count} bytes early")
            with compute_slot():
                sums.update(memory[:expected].data)
            done += expected
    with compute_slot():
        if at_once:
            good = is_good_block(algorithm, block, memory[: block.stored].data)
        elif block.codec is not None:
            good = sums.intdigest() == block.checksum
        else:
            good = sums.digest() == block.digest
    if not good:
        raise IntegrityError(f"{where} does not match its {'digest' if block.codec is None or at_once else 'checksum'}")
