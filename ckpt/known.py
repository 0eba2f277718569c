"""The blocks of the step before, which the next one may refer to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import xxhash

from ckpt.arena import round_up
from ckpt.places import from_nearest
from ckpt.read import is_bad_sector
from ckpt.storage.base import Store
from ckpt.storage.errors import IntegrityError, StoreError
from ckpt.storage.pages import pages
from ckpt.storage.sums import CELL_BYTES, bad_cells

log = logging.getLogger("ckpt")

_PIECE = 4 * CELL_BYTES
"""Read and summed at a time."""


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """Where a block of the previous step is stored."""

    pack: str
    position: int
    stored: int
    codec: str | None
    checksum: int | None
    """xxh3-64 of the stored bytes, None where those are the raw bytes."""
    seen: bool = False
    """This process has written it, or read it since: it may be referred to. Another process's may have rotted, and a step
    that shares it would be no better than the one before."""


KnownBlocks = dict[tuple[bytes, int], KnownBlock]
"""Blocks by digest and raw length."""


def is_whole(
    store: Store, block: KnownBlock, cells: bytes, computing: Callable[[], AbstractContextManager[object]]
) -> bool:
    """Whether a block is as it was written; if not, it is told in the log, and remembered as bad. Raises StoreError.

    cells: the checksums of the cells of the raw block.
    computing: entered while this works and does not wait for the store.
    """

    def read(copy: Store) -> None:
        where = f"{copy.url}/{block.pack}, block at byte {block.position},"
        hasher, good, done = xxhash.xxh3_64(), True, 0
        # Far away each call takes its time: all at once.
        at_once = _PIECE if copy.past_cache else -(-block.stored // CELL_BYTES) * CELL_BYTES
        memory = np.frombuffer(pages(min(at_once, round_up(block.stored))), np.uint8)
        try:
            with copy.open_once(block.pack) as reader:
                while done < block.stored and good:
                    wanted = min(at_once, block.stored - done)
                    # Whole pages, as packs have them: such can pass the page cache.
                    count = reader.read_into(block.position + done, memory[: round_up(wanted)].data)
                    if count < wanted:
                        raise IntegrityError(f"{where} ends {block.stored - done - count} bytes early")
                    with computing():
                        if block.codec is not None:
                            hasher.update(memory[:wanted].data)
                        else:
                            at = done // CELL_BYTES * 8
                            good = not bad_cells(memory[:wanted].data, cells[at : at + at_once // CELL_BYTES * 8])
                    done += wanted
        except StoreError as error:
            if not is_bad_sector(error):
                raise
            raise IntegrityError(f"{where} cannot be read: {error}") from error
        if not good or (block.codec is not None and hasher.intdigest() != block.checksum):
            raise IntegrityError(f"{where} does not match its checksum")

    try:
        from_nearest(store, read, block.pack, block.position)
    except IntegrityError as error:
        log.warning("%s; it is written again, and not referred to", error)
        return False
    return True
