"""The second stage of a save: digests and encodes staged blocks, and writes them to packs if they are new."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.block_io.staging_arena import Region, round_up
from ckpt.format.digest import checksum, digest_and_cells
from ckpt.format.manifest_encoding import StoredBlock
from ckpt.format.pack import PackFile, PackWriter
from ckpt.saving.block_encoding import BlockEncoder, EncodedBlock, block_position
from ckpt.saving.block_plan import Block
from ckpt.saving.buffer_shares import BufferDigests
from ckpt.saving.changing_leaves import ChangingLeaves
from ckpt.saving.codec_tuner import SaveCodecs
from ckpt.saving.compute_slots import ComputeSlots
from ckpt.saving.dedup import BlockPosition, ContentKey, PreviousBlock, PreviousBlockIndex, PreviousBlocks
from ckpt.saving.difference_encoder import DifferenceSource
from ckpt.saving.nan_guard import NanGuard
from ckpt.saving.save_plan import SavePlan
from ckpt.saving.staging import StagedBlock


@dataclass(frozen=True, slots=True)
class WritingParts:
    """What the writer threads of one attempt share. Each part is safe to use from many threads."""

    plan: SavePlan
    packs: PackWriter
    previous: PreviousBlockIndex
    changing: ChangingLeaves
    buffers: BufferDigests
    nan: NanGuard
    codecs: SaveCodecs
    slots: ComputeSlots
    append_began: threading.Event
    """Set before the first bytes are written to the store."""
    differences: DifferenceSource | None = None
    """Where to find bases of differences; None to store all blocks in full."""


@dataclass(frozen=True, slots=True)
class WrittenBlocks:
    """The blocks of an attempt after writing."""

    rows: list[StoredBlock]
    """The rows of the manifest, one for each block, in the order of the plan."""
    blocks: PreviousBlocks
    """The same blocks by digest, to which the next step may refer."""
    positions: dict[BlockPosition, ContentKey]
    """The block at each position."""
    referenced_packs: set[str]
    """The packs of earlier steps to which rows refer."""
    packs: list[PackFile]
    """The packs that this attempt wrote. They are durable."""


class BlockWriter:
    """Writes blocks for one thread. Only that thread changes it."""

    def __init__(self, parts: WritingParts) -> None:
        self._parts = parts
        self._encoder = BlockEncoder(parts.plan, parts.codecs, parts.slots, parts.differences)
        self.rows: list[tuple[int, StoredBlock]] = []
        """The index of each block in the plan, and its row."""
        self.blocks: PreviousBlocks = {}
        self.referenced_packs: set[str] = set()

    def write(self, staged: StagedBlock) -> None:
        """Write a block, or refer to the stored block of an earlier step if that has the same bytes. Adds its row."""
        parts = self._parts
        block, data = parts.plan.blocks[staged.number], staged.region.data
        if staged.sums is not None:
            block_digest, cells = staged.sums
        else:
            with parts.slots.slot():
                block_digest, cells = digest_and_cells(parts.plan.algorithm, data[: block.nbytes].data)
        parts.buffers.add_block(block, parts.plan.specs, data)
        if parts.nan.is_active:
            with parts.slots.slot():
                parts.nan.check(staged.number, data)
        key = (block_digest, block.nbytes)
        location = parts.previous.find(key)
        if location is None:
            with parts.slots.slot():
                parts.changing.compare_block(block, parts.plan.specs, data)
            location = self._append(block, staged.region)
        else:
            self.referenced_packs.add(location.pack)
        if location.base is not None:
            self.referenced_packs.add(location.base.pack)
        self.blocks[key] = location
        row = StoredBlock(
            pack=location.pack,
            position=location.position,
            stored=location.stored,
            raw=block.nbytes,
            codec=location.codec,
            digest=block_digest,
            checksum=location.checksum,
            cells=cells if location.codec is None else b"",
            base=location.base,
        )
        self.rows.append((staged.number, row))

    def _append(self, block: Block, region: Region) -> PreviousBlock:
        self._parts.codecs.block_began()
        encoded = EncodedBlock(None, None)
        try:
            encoded = self._encoder.encode(block, region.data[: block.nbytes])
            return self._append_encoded(block, encoded, region)
        finally:
            self._parts.codecs.block_ended(block.nbytes, encoded.has_encoded)

    def _append_encoded(self, block: Block, encoded: EncodedBlock, region: Region) -> PreviousBlock:
        parts = self._parts
        stored, padded, check = block.nbytes, region.data[: round_up(block.nbytes)], None
        if encoded.data is not None:
            with parts.slots.slot():
                stored, check = len(encoded.data), checksum(encoded.data)
            padded = region.data[: round_up(stored)]  # overwrites the raw bytes, which are not needed any more
            padded[:stored] = encoded.data
            padded[stored:] = 0
        parts.append_began.set()
        parts.codecs.write_began()
        try:
            pack, position = parts.packs.append(padded.data)
        finally:
            parts.codecs.write_ended(len(padded))
        return PreviousBlock(pack, position, stored, encoded.codec, check, encoded.base, is_verified=True)

    def close(self) -> None:
        """Close the files from which bases were read."""
        self._encoder.close()


def join_written(plan: SavePlan, writers: Iterable[BlockWriter], packs: list[PackFile]) -> WrittenBlocks:
    """Return what the writers of all threads wrote. Call it when all of them have ended."""
    rows: dict[int, StoredBlock] = {}
    blocks: PreviousBlocks = {}
    referenced: set[str] = set()
    for writer in writers:
        rows.update(writer.rows)
        blocks.update(writer.blocks)
        referenced |= writer.referenced_packs
    ordered = [rows[number] for number in range(len(plan.blocks))]
    positions = {
        block_position(block, plan.specs): (row.digest, row.raw) for block, row in zip(plan.blocks, ordered, strict=True)
    }
    return WrittenBlocks(rows=ordered, blocks=blocks, positions=positions, referenced_packs=referenced, packs=packs)
