"""Encodes blocks as differences to the last full block at the same position, where that pays.

docs/design/differences.md describes the design. A base is read from the store again and verified. It is read through the page
cache, which keeps it for the next saves while the host has free memory. Each writer thread needs memory for four blocks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckpt.block_io.block_reader import BlockReader
from ckpt.block_io.read_plan import BlockRead
from ckpt.block_io.staging_arena import round_up
from ckpt.format import codec
from ckpt.format.block_difference import BaseBlock, difference_width, subtract
from ckpt.format.difference_choice import MAX_AUTOMATIC_FRACTION
from ckpt.format.manifest import Row
from ckpt.format.pack import step_of_file
from ckpt.saving.changing_leaves import REMEMBERED_REPOSITORIES
from ckpt.saving.dedup import BlockPosition, StepBlocks
from ckpt.saving.difference_speeds import DifferenceMeasurement
from ckpt.state.boxes import Box
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.forks import call_in_forked_child, fork_safe_lock
from ckpt.storage.base.store import Store

log = logging.getLogger("ckpt")

MAX_DIFFERENCE_FRACTION = 0.8
"""A difference that is larger than this fraction of the full block does not justify that a load reads two blocks."""

_MIN_BYTES = 16 << 10
"""A smaller block needs so few pages of a pack that its difference saves nothing that justifies a second read."""

_SAMPLE_BYTES = 64 << 10
_FEW_CHANGES_FRACTION = 0.05
"""If the fast codec shrinks the sample to this fraction, few elements have changed, and a slower codec gains little."""

_FAST_CODEC = json.dumps({"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 0, "blocksize": 0}, sort_keys=True)
_STRONG_CODECS = tuple(
    json.dumps({"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": shuffle, "blocksize": 0}, sort_keys=True)
    for shuffle in (1, 2)
)


@dataclass(frozen=True, slots=True)
class DifferenceSize:
    """What is known of a block when its difference is encoded."""

    raw_bytes: int
    full_bytes: int
    """Stored bytes of the block if it is stored in full. The stored bytes of its base are a good estimate."""
    difference_bytes: int
    """Stored bytes of the difference."""


def difference_pays(size: DifferenceSize, max_fraction: float = MAX_DIFFERENCE_FRACTION) -> bool:
    """Return whether to store the difference instead of the full block. This is a pure function."""
    return round_up(size.difference_bytes) <= max_fraction * round_up(min(size.raw_bytes, size.full_bytes))


def is_usable_base(base_step: int, step: int, full_every: int) -> bool:
    """Return whether a block that `base_step` wrote may be the base of a difference in `step`. This is a pure function.

    full_every: the first save in each range of so many step numbers stores all changed blocks in full.
    """
    return base_step < step and base_step // full_every == step // full_every


def newest_step(packs: Iterable[str]) -> int | None:
    """Return the highest step that wrote one of these packs; None without packs."""
    return max((step_of_file(pack) for pack in packs), default=None)


def choose_difference_codec(sample: Bytes, width: int) -> str:
    """Return the codec for a difference: the fast one if few elements have changed, else the one that shrinks most.

    sample: a part of the difference. width: bytes of an element.
    """
    if len(codec.encode(_FAST_CODEC, sample, width)) <= _FEW_CHANGES_FRACTION * len(sample):
        return _FAST_CODEC
    return min(_STRONG_CODECS, key=lambda config: len(codec.encode(config, sample, width)))


class EncodedDifference(NamedTuple):
    """A difference as it is stored."""

    base: BaseBlock
    codec: str
    stored: memoryview


class TriedDifference(NamedTuple):
    """The result of computing the difference of a block."""

    result: EncodedDifference | None
    """None if the block is to be stored in full."""
    measured: DifferenceMeasurement | None
    """None if the block has no base, or none that can be read."""


class DifferenceHistory:
    """What earlier saves of one repository and rank found at each position. A process keeps it.

    Safe to use from many threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._ranges: dict[BlockPosition, int] = {}
        """The number of the range of steps in which even the difference to the last value did not pay, by position."""
        self._bases_read: dict[BlockPosition, bytes] = {}
        """The digest of the base that was read last, by position."""

    def is_unrelated(self, position: BlockPosition, number: int) -> bool:
        """Return whether a difference at this position did not pay in the range of this number, so that no base is read."""
        with self._lock:
            return self._ranges.get(position) == number

    def note_unrelated(self, position: BlockPosition, number: int) -> None:
        """Record that the difference at this position did not pay in the range of this number."""
        with self._lock:
            self._ranges[position] = number

    def note_base_read(self, position: BlockPosition, base: BaseBlock) -> bool:
        """Record that a base is read; return whether the one that was read before is the same, so that a cache may have it."""
        with self._lock:
            before, self._bases_read[position] = self._bases_read.get(position), base.digest
        return before == base.digest


_remembered: dict[tuple[str, int], DifferenceHistory] = {}
call_in_forked_child(_remembered.clear)
_registry_lock = fork_safe_lock()
"""Guards `_remembered`."""


def difference_history_of(url_and_rank: tuple[str, int]) -> DifferenceHistory:
    """Return the history of this rank and this URL; only the last few repositories are remembered."""
    with _registry_lock:
        found = _remembered[url_and_rank] = (
            _remembered.pop(url_and_rank) if url_and_rank in _remembered else DifferenceHistory()
        )
        while len(_remembered) > REMEMBERED_REPOSITORIES:
            del _remembered[next(iter(_remembered))]
        return found


@dataclass(frozen=True, slots=True)
class DifferenceSource:
    """What the writer threads of one attempt need for differences."""

    store: Store
    algorithm: str
    step: int
    full_every: int
    previous: StepBlocks
    history: DifferenceHistory
    compute_slot: Callable[[], AbstractContextManager[object]]
    """A context that is entered while this computes and does not wait for the store."""
    is_automatic: bool = False
    """Whether `auto` decides for each block if it is tried. Then a difference must halve the stored bytes."""

    def base_at(self, position: BlockPosition, width: int) -> BaseBlock | None:
        """Return the base for the block at a position; None if there is none, or no difference is expected to pay."""
        if self.history.is_unrelated(position, self.step // self.full_every):
            return None
        key = self.previous.positions.get(position)
        block = None if key is None else self.previous.blocks.get(key)
        if key is None or block is None:
            return None
        found = block.base or BaseBlock(block.pack, block.position, block.stored, block.codec, key[0], block.checksum, width)
        is_usable = is_usable_base(step_of_file(found.pack), self.step, self.full_every)
        return found._replace(width=width) if is_usable else None

    def note_unrelated(self, position: BlockPosition, base: BaseBlock) -> None:
        """Record that the difference to this base did not pay. It counts only if the base is the last value at its position."""
        if self.previous.positions[position] == (base.digest, position.nbytes):
            self.history.note_unrelated(position, self.step // self.full_every)


class DifferenceEncoder:
    """Computes and encodes differences for one writer thread, until `close`."""

    def __init__(self, source: DifferenceSource) -> None:
        self._source = source
        where = f"step {source.step} of {source.store.url}, base of a difference"
        self._reader = BlockReader(source.store, source.algorithm, where, None)
        self._difference = np.empty(0, np.uint8)

    @property
    def is_automatic(self) -> bool:
        """Whether `auto` decides for each block if it is tried."""
        return self._source.is_automatic

    def encode(self, position: BlockPosition, raw: Bytes, itemsize: int) -> TriedDifference:
        """Compute the difference of a block to the full block at its position, and encode it.

        itemsize: bytes of an element of the block.
        """
        source, width = self._source, difference_width(itemsize, len(raw))
        base = source.base_at(position, width) if len(raw) >= _MIN_BYTES else None
        if base is None:
            return TriedDifference(None, None)
        processor, began = time.thread_time(), time.perf_counter()
        was_read = source.history.note_base_read(position, base)
        if (base_data := self._read(position, base)) is None:
            return TriedDifference(None, None)
        base_seconds = time.perf_counter() - began if was_read else None
        with source.compute_slot():
            if len(self._difference) < len(raw):
                self._difference = np.empty(len(raw), np.uint8)
            difference = self._difference[: len(raw)]
            subtract(raw, base_data, width, difference)
            middle = len(raw) // 2 // _SAMPLE_BYTES * _SAMPLE_BYTES
            config = choose_difference_codec(difference[middle : middle + _SAMPLE_BYTES], width)
            stored = codec.encode(config, difference, width)
        measured = DifferenceMeasurement(len(raw), len(stored), time.thread_time() - processor, base_seconds)
        most = MAX_AUTOMATIC_FRACTION if source.is_automatic else MAX_DIFFERENCE_FRACTION
        if not difference_pays(DifferenceSize(len(raw), base.stored, len(stored)), most):
            source.note_unrelated(position, base)
            return TriedDifference(None, measured)
        return TriedDifference(EncodedDifference(base, config, stored), measured)

    def _read(self, position: BlockPosition, base: BaseBlock) -> Bytes | None:
        """Return the raw base; None if it is damaged or can't be read now, so that the block is stored in full."""
        nothing = Box((), ())
        row = Row(
            leaf=position.leaf,
            dtype="uint8",
            global_shape=(),
            box=nothing,
            pack=base.pack,
            position=base.position,
            stored=base.stored,
            raw=position.nbytes,
            start=0,
            nbytes=position.nbytes,
            codec=base.codec,
            digest=base.digest,
            checksum=base.checksum,
            cells=b"",
        )
        try:
            return self._reader.read_whole(BlockRead(row))
        except CkptError as error:
            log.warning("%s; the block is written in full", error)
            return None

    def close(self) -> None:
        """Close the open files."""
        self._reader.close()
