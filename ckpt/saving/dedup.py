"""The blocks of the step before, which the next one may refer to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.block_io.block_check import verify_stored_block
from ckpt.block_io.block_reader import is_bad_sector
from ckpt.block_io.replicated_store import from_nearest
from ckpt.format.manifest import StoredBlock
from ckpt.storage.base.errors import IntegrityError, StoreError
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class PreviousBlock:
    """Where a block of the previous step is stored."""

    pack: str
    position: int
    stored: int
    codec: str | None
    checksum: int | None
    """xxh3-64 of the stored bytes, None where those are the raw bytes."""
    is_verified: bool = False
    """This process has written it, or read it since: it may be referred to. Another process's may have rotted, and a step
    that shares it would be no better than the one before."""


PreviousBlocks = dict[tuple[bytes, int], PreviousBlock]
"""Blocks by digest and raw length."""


class StepBlocks(NamedTuple):
    """What a committed step consists of."""

    blocks: PreviousBlocks
    packs: dict[str, int]
    """All that the step names, with their lengths."""


def referable_blocks(newest_first: Sequence[StepBlocks], copies: int) -> StepBlocks:
    """What the next step may refer to, given the last `copies` steps: the blocks of the step `copies` before it that none of
    those in between refers to. Pure."""
    if len(newest_first) < copies:
        return StepBlocks({}, {})
    found = newest_first[copies - 1]
    if copies == 1:
        return found
    taken = {(b.pack, b.position) for step in newest_first[: copies - 1] for b in step.blocks.values()}
    return StepBlocks({k: b for k, b in found.blocks.items() if (b.pack, b.position) not in taken}, found.packs)


def is_block_intact(
    store: Store, algorithm: str, key: tuple[bytes, int], block: PreviousBlock,
    compute_slot: Callable[[], AbstractContextManager[object]],
) -> bool:  # fmt: skip
    """Whether a block is as it was written; if not, it is told in the log, and remembered as bad. Raises StoreError.

    key: its digest and raw length.
    computing: entered while this works and does not wait for the store.
    """
    stated = StoredBlock(block.pack, block.position, block.stored, key[1], block.codec, key[0], block.checksum, b"")

    def read(copy: Store) -> None:
        try:
            verify_stored_block(copy, block.pack, algorithm, stated, compute_slot)
        except StoreError as error:
            if not is_bad_sector(error):
                raise
            where = f"{copy.url}/{block.pack}, block at byte {block.position},"
            raise IntegrityError(f"{where} cannot be read: {error}") from error

    try:
        from_nearest(store, read, block.pack, block.position)
    except IntegrityError as error:
        log.warning("%s; it is written again, and not referred to", error)
        return False
    return True
