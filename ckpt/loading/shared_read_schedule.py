"""Who reads what for whom, where several ranks need the same bytes. Pure, and the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpt.format.digest import CELL_BYTES
from ckpt.format.limits import BLOCK_BYTES

ROUND_BYTES = 96 << 20
"""Blocks that a rank reads, sends and receives in one round."""

_MIN_READ_RATIO = 1.05  # what the group reads over what there is, from which on sharing begins

NeedRows = np.ndarray
"""Rows of (pack, position, raw bytes, stored bytes, from, to), one a stretch, in the order in which they lie."""

NEED_COLUMNS = 6

BlockKey = tuple[int, int]
"""Pack and position of a block."""


class NeededRange(NamedTuple):
    """Bytes [begin, end) of a raw block."""

    begin: int
    end: int
    read_bytes: int
    """To be read for it."""
    ranks: Sequence[int]
    """Those that can read and verify it."""


class RankRange(NamedTuple):
    """A part that a rank needs of a block that it does not need whole, from and to."""

    rank: int
    begin: int
    end: int


@dataclass(slots=True)
class BlockNeeds:
    """What the ranks need of one block."""

    raw_bytes: int
    stored_bytes: int
    """The bytes to read for all of it."""
    whole_block_ranks: list[int] = field(default_factory=list)
    """The ranks that need all of it."""
    partial_ranges: list[RankRange] = field(default_factory=list)
    unshared_bytes: int = 0
    """The bytes that are read where each rank reads for itself."""
    _needed_ranges: list[NeededRange] | None = None

    def needed_ranges(self) -> list[NeededRange]:
        """What is to be read of it, each byte once. All of it where a rank needs it all; else what lies between two edges."""
        if self._needed_ranges is None:
            self._needed_ranges = self._find_needed_ranges()
        return self._needed_ranges

    def _find_needed_ranges(self) -> list[NeededRange]:
        if self.whole_block_ranks:
            return [NeededRange(0, self.raw_bytes, self.stored_bytes, self.whole_block_ranks)]
        changes: dict[int, list[int]] = {}  # at each edge the ranks that want what follows, if they did not before
        for rank, begin, end in self.partial_ranges:
            changes.setdefault(begin, []).append(rank)
            changes.setdefault(end, []).append(rank)
        found, ranks = [], set[int]()
        for begin, end in itertools.pairwise(sorted(changes)):
            ranks.symmetric_difference_update(changes[begin])
            if ranks:
                found.append(NeededRange(begin, end, end - begin, sorted(ranks)))
        return found

    def ranges_by_rank(self) -> Iterator[RankRange]:
        """What each rank needs of it."""
        yield from (RankRange(rank, 0, self.raw_bytes) for rank in self.whole_block_ranks)
        yield from self.partial_ranges


class ReadJob(NamedTuple):
    """A stretch of a block, and who reads it."""

    begin: int
    end: int
    reader: int


@dataclass(frozen=True, slots=True)
class SharedRead:
    """One block on its way: when, who reads what of it, and who needs it. Jobs are in the same order on all ranks."""

    round: int
    jobs: list[ReadJob]
    needs: BlockNeeds
    first_job: int
    """The number of its first job, of those of all blocks."""

    def sent_by(self, rank: int) -> Iterator[RankRange]:
        """What a rank sends, and to whom."""
        for begin, end, reader in self.jobs:
            if reader == rank:
                for taker, first, last in self.needs.ranges_by_rank():
                    if taker != rank and max(begin, first) < min(end, last):
                        yield RankRange(taker, max(begin, first), min(end, last))

    def received_by(self, rank: int, first: int, last: int) -> Iterator[RankRange]:
        """What a rank that needs these bytes receives, and from whom."""
        for begin, end, reader in self.jobs:
            if reader != rank and max(begin, first) < min(end, last):
                yield RankRange(reader, max(begin, first), min(end, last))


def needs_by_block(needs: Sequence[NeedRows]) -> dict[BlockKey, BlockNeeds]:
    """What the ranks need, by block."""
    found: dict[BlockKey, BlockNeeds] = {}
    for rank, need in enumerate(needs):
        for pack, position, raw, stored, begin, end in need.tolist():
            if (block := found.get((pack, position))) is None:
                block = found[pack, position] = BlockNeeds(raw, stored)
            block.unshared_bytes += stored if end - begin == raw else end - begin
            if end - begin == raw:
                block.whole_block_ranks.append(rank)
            else:
                block.partial_ranges.append(RankRange(rank, begin, end))
    return found


def schedule_shared_reads(blocks: Mapping[BlockKey, BlockNeeds], size: int) -> dict[BlockKey, SharedRead]:
    """The turn of each block of which several of `size` ranks need the same bytes. Pure; the same on every rank.

    Of those that can read a stretch it is read by the one that has the fewest bytes to read so far. A round is full for a
    rank at ROUND_BYTES.
    """
    bytes_to_read = [0] * size
    ranges_by_block: dict[BlockKey, list[NeededRange]] = {}
    for key in sorted(blocks):
        ranges = blocks[key].needed_ranges()
        if blocks[key].unshared_bytes > _total_read_bytes(ranges):
            ranges_by_block[key] = ranges
            continue
        for stretch in ranges:
            bytes_to_read[stretch.ranks[0]] += stretch.read_bytes
    round_bytes = [0] * size
    found: dict[BlockKey, SharedRead] = {}
    count = 0
    for key, ranges in ranges_by_block.items():
        block = blocks[key]
        jobs: list[ReadJob] = []
        for begin, end, nbytes, ranks in ranges:
            before = jobs[-1] if jobs and jobs[-1].end == begin else None
            if before is not None and before.reader in ranks and nbytes <= CELL_BYTES:
                reader = before.reader  # the cell at a border: one read of two stretches costs one call
            else:
                reader = min(ranks, key=lambda r: (bytes_to_read[r], before is None or r != before.reader, r))
            bytes_to_read[reader] += nbytes
            if before is not None and before.reader == reader:
                jobs[-1] = ReadJob(before.begin, end, reader)
            else:
                jobs.append(ReadJob(begin, end, reader))
        ranks_in_need = [part.rank for part in block.ranges_by_rank()]
        first = max(round_bytes[rank] for rank in ranks_in_need)
        if first % ROUND_BYTES + block.raw_bytes > ROUND_BYTES:
            first = (first // ROUND_BYTES + 1) * ROUND_BYTES
        for rank in ranks_in_need:
            round_bytes[rank] = first + block.raw_bytes
        found[key] = SharedRead(first // ROUND_BYTES, jobs, block, count)
        count += len(jobs)
    return found


def _total_read_bytes(stretches: Sequence[NeededRange]) -> int:
    return sum(stretch.read_bytes for stretch in stretches)


def is_worth_sharing(blocks: Mapping[BlockKey, BlockNeeds]) -> bool:
    """Whether the group reads much less where ranks read for each other."""
    total = sum(block.unshared_bytes for block in blocks.values())
    return total > _MIN_READ_RATIO * sum(_total_read_bytes(block.needed_ranges()) for block in blocks.values())


def has_disjoint_needs(block: BlockNeeds) -> bool:
    """Whether ranks that need a block read different bytes of it, but for the cells at their borders."""
    ranges = block.needed_ranges()
    return block.unshared_bytes <= _total_read_bytes(ranges) + (len(ranges) - 1) * CELL_BYTES


assert ROUND_BYTES > BLOCK_BYTES
