"""Decides how a block is stored: as a difference, by its codec, or as it is, whichever pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpt.format import codec
from ckpt.format.block_difference import BaseBlock
from ckpt.saving.block_plan import Block, LeafSpec
from ckpt.saving.codec_tuner import EncodingTimer, SaveCodecs
from ckpt.saving.compute_slots import ComputeSlots
from ckpt.saving.dedup import BlockPosition
from ckpt.saving.difference_encoder import DifferenceEncoder, DifferenceSource, EncodedDifference
from ckpt.saving.save_plan import SavePlan
from ckpt.state.leaves.base import Bytes

_MAX_ENCODED_FRACTION = 0.98
"""A block that a codec shrinks by less is stored without a codec, and can then be read in parts."""


class EncodedBlock(NamedTuple):
    """A block as it is stored. Without a codec, `data` is None and the raw bytes are stored."""

    codec: str | None
    data: memoryview | None
    base: BaseBlock | None = None
    has_encoded: bool | None = None
    """Whether a codec that was chosen automatically encoded it, also if it did not shrink; None if nothing was chosen."""


class BlockEncoder:
    """Encodes the blocks of one attempt for one thread. Only that thread uses it.

    differences: where to find bases of differences; None to store all blocks in full.
    """

    def __init__(self, plan: SavePlan, codecs: SaveCodecs, slots: ComputeSlots, differences: DifferenceSource | None) -> None:
        self._plan = plan
        self._codecs = codecs
        self._slots = slots
        self._differences = None if differences is None else DifferenceEncoder(differences)

    def encode(self, block: Block, raw: Bytes) -> EncodedBlock:
        """Return a block as it is to be stored. raw: its bytes."""
        config, dtype = block.codec, self._plan.leaves[block.pieces[0].leaf].dtype
        if config == "auto":
            with self._slots.slot():
                config = self._codecs.pick(dtype, raw, block.itemsize)
        found = self._difference(block, dtype, raw)
        if found is not None:
            return EncodedBlock(found.codec, found.stored, found.base)
        is_automatic = block.codec == "auto"
        if config is None:
            return EncodedBlock(None, None, has_encoded=False if is_automatic else None)
        with self._slots.slot():
            timer = EncodingTimer()
            encoded = codec.encode(config, raw, block.itemsize)
            speed, share = timer.stop(block.nbytes)
        shrinks = len(encoded) <= _MAX_ENCODED_FRACTION * block.nbytes
        if is_automatic:
            self._codecs.note_encoded(dtype, config, len(encoded) / block.nbytes if shrinks else 1.0, speed, share)
        found_codec, data = (config, encoded) if shrinks else (None, None)
        return EncodedBlock(found_codec, data, has_encoded=True if is_automatic else None)

    def _difference(self, block: Block, dtype: str, raw: Bytes) -> EncodedDifference | None:
        """Return the difference that is to be stored; None to store the block in full."""
        encoder = self._differences
        if encoder is None:
            return None
        position = block_position(block, self._plan.specs)
        if not encoder.is_automatic:
            return encoder.encode(position, raw, block.itemsize).result
        if block.codec != "auto" or not self._codecs.try_difference(dtype):
            return None
        tried = encoder.encode(position, raw, block.itemsize)
        self._codecs.note_difference(dtype, tried.measured)
        return tried.result

    def close(self) -> None:
        """Close the files from which bases were read."""
        if self._differences is not None:
            self._differences.close()


def block_position(block: Block, specs: Sequence[LeafSpec]) -> BlockPosition:
    """Return the position of a block: what it contains. specs: those of the leaves of the plan."""
    piece = block.pieces[0]
    spec = specs[piece.leaf]
    box = piece.box if spec.global_shape is None else piece.box.moved(spec.offset)
    return BlockPosition(spec.name, box.offset, block.nbytes)
