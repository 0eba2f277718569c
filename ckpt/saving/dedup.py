"""The previous blocks: stored blocks of earlier steps to which the next step may refer instead of a copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from ckpt.block_io.replicated_store import from_nearest
from ckpt.block_io.stored_block_check import verify_stored_block
from ckpt.errors import bad_sectors_as_damage
from ckpt.format.block_difference import BaseBlock
from ckpt.format.manifest_encoding import StoredBlock
from ckpt.storage.base.errors import IntegrityError, StoreError
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class PreviousBlock:
    """Where a block of an earlier step is stored."""

    pack: str
    position: int
    stored: int
    codec: str | None
    checksum: int | None
    """xxh3-64 of the stored bytes; None if those are the raw bytes."""
    base: BaseBlock | None = None
    """The base block if this is a difference."""
    is_verified: bool = False
    """Whether this process has written or read the block, so that a step may refer to it. A block of another process may be
    damaged, and then damage the new step as well."""


ContentKey = tuple[bytes, int]
"""Digest and raw length of a block. Blocks with equal keys have equal bytes."""

PreviousBlocks = dict[ContentKey, PreviousBlock]


class BlockPosition(NamedTuple):
    """What a block contains, so that the block of the next step with the same position is probably similar."""

    leaf: str
    """The name of its first leaf."""
    offset: tuple[int, ...]
    """The offset of its first piece in the whole array."""
    nbytes: int
    """Its raw bytes."""


class StepBlocks(NamedTuple):
    """The blocks and packs of a committed step."""

    blocks: PreviousBlocks
    packs: dict[str, int]
    """The bytes of each pack of the step, by name."""
    positions: Mapping[BlockPosition, ContentKey] = MappingProxyType({})
    """The block at each position."""


def referable_blocks(newest_first: Sequence[StepBlocks], copies: int) -> StepBlocks:
    """Return the blocks to which the next step may refer. This is a pure function.

    These are the blocks of the step `copies` steps earlier to which none of the steps in between refers.

    newest_first: the last `copies` steps.
    """
    if len(newest_first) < copies:
        return StepBlocks({}, {})
    found = newest_first[copies - 1]
    if copies == 1:
        return found
    taken = {(b.pack, b.position) for step in newest_first[: copies - 1] for b in step.blocks.values()}
    return StepBlocks({k: b for k, b in found.blocks.items() if (b.pack, b.position) not in taken}, found.packs)


def without_packs(step: StepBlocks, unusable: Collection[str]) -> StepBlocks:
    """Return the blocks that are not in one of these packs, and whose bases are not. This is a pure function."""
    if not unusable:
        return step
    usable = {
        key: block
        for key, block in step.blocks.items()
        if block.pack not in unusable and (block.base is None or block.base.pack not in unusable)
    }
    return step._replace(blocks=usable)


def base_of(block: PreviousBlock, nbytes: int) -> tuple[ContentKey, PreviousBlock] | None:
    """Return the key and the block of the base of a difference; None for a block in full.

    nbytes: the raw bytes of the block.
    """
    if (base := block.base) is None:
        return None
    return (base.digest, nbytes), PreviousBlock(base.pack, base.position, base.stored, base.codec, base.checksum)


def is_block_intact(
    store: Store, algorithm: str, key: ContentKey, block: PreviousBlock,
    compute_slot: Callable[[], AbstractContextManager[object]],
) -> bool:  # fmt: skip
    """Return whether a block, with its base, has the bytes that were written. A damaged block is logged. Raises StoreError.

    compute_slot: a context that is entered while this computes and does not wait for the store.
    """
    stated = StoredBlock(
        pack=block.pack,
        position=block.position,
        stored=block.stored,
        raw=key[1],
        codec=block.codec,
        digest=key[0],
        checksum=block.checksum,
        cells=b"",
    )

    def read(copy: Store) -> None:
        with bad_sectors_as_damage(f"{copy.url}/{block.pack}, block at byte {block.position},"):
            verify_stored_block(copy, block.pack, algorithm, stated, compute_slot)

    try:
        from_nearest(store, read, block.pack, block.position)
    except IntegrityError as error:
        log.warning("%s; the block is written again, and no new step refers to it", error)
        return False
    base = base_of(block, key[1])
    return base is None or is_block_intact(store, algorithm, *base, compute_slot)


class PreviousBlockIndex:
    """The blocks of earlier steps to which one attempt may refer. Safe to use from many threads.

    blocks: is updated if a block was read and verified, so that the next attempt need not read it again. It has no lock: each
        entry is replaced as a whole.
    compute_slot: a context that is entered while a block is digested.
    """

    def __init__(
        self, store: Store, algorithm: str, blocks: PreviousBlocks, compute_slot: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._store = store
        self._algorithm = algorithm
        self._blocks = blocks
        self._compute_slot = compute_slot
        self._lock = threading.Lock()
        """Guards the following attributes. It is not held while a block is read."""
        self._bad_blocks: set[ContentKey] = set()
        self._unreadable_packs: set[str] = set()

    def find(self, key: ContentKey) -> PreviousBlock | None:
        """Return where a block is stored, or None if it must be written.

        A block that this process has neither written nor read is read and verified first, because it may be damaged.
        """
        previous = self._blocks.get(key)
        return previous if previous is None or previous.is_verified else self._verify(key, previous)

    def _verify(self, key: ContentKey, previous: PreviousBlock) -> PreviousBlock | None:
        with self._lock:
            if key in self._bad_blocks or previous.pack in self._unreadable_packs:
                return None
        try:
            if is_block_intact(self._store, self._algorithm, key, previous, self._compute_slot):
                verified = self._blocks[key] = replace(previous, is_verified=True)
                return verified
            with self._lock:
                self._bad_blocks.add(key)
        except StoreError as error:
            with self._lock:
                is_reported = previous.pack in self._unreadable_packs
                self._unreadable_packs.add(previous.pack)
            if not is_reported:
                log.warning("%s; the blocks of %s are written again, and no new step refers to it", error, previous.pack)
        return None
