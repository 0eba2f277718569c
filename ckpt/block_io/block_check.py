"""Whether stored bytes are those of a block, as it was written."""

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
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import Store

_CHUNK_BYTES = 4 * CELL_BYTES
"""Read and hashed at a time."""


class StatedBlock(Protocol):
    """What a manifest states of a block: `Row` and `StoredBlock` have it."""

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
    """Whether these are the stored bytes of a block.

    The checksum of the stored bytes finds accidents. Where the digest is a cryptographic one, that is compared too.
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
    except (MemoryError, ImportError):
        raise
    except Exception:  # codecs raise what they like
        return False
    return digest(algorithm, raw) == block.digest


def verify_stored_block(
    store: Store, name: str, algorithm: str, block: StatedBlock, compute_slot: Callable[[], AbstractContextManager[object]]
) -> None:
    """Read a block past the page cache; raise IntegrityError where it is not as it was written, StoreError as `store` does.

    computing: entered while this works and does not wait for the store.
    """
    where = f"{store.url}/{name}, block at byte {block.position},"
    at_once = block.codec is not None and is_cryptographic(algorithm)  # its digest is that of the decoded bytes
    if at_once and block.stored > MAX_BLOCK_BYTES:
        raise IntegrityError(f"{where} has {block.stored} bytes, and blocks have at most {MAX_BLOCK_BYTES}")
    # Far away each call takes its time: all in one call.
    chunk_bytes = _CHUNK_BYTES if store.past_cache and not at_once else max(1, min(block.stored, MAX_BLOCK_BYTES))
    memory = np.frombuffer(map_huge_pages(min(round_up(chunk_bytes), round_up(block.stored))), np.uint8)
    sums: Any = xxhash.xxh3_64() if block.codec is not None else hasher(algorithm)
    done = 0
    with store.open_once(name) as reader:
        while done < block.stored:
            expected = min(chunk_bytes, block.stored - done)
            # Whole pages, as packs have them: such can pass the page cache.
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
