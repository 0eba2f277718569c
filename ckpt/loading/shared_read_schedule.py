"""Decides which rank reads which bytes for which others. Pure; every rank computes the same schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpt.format.digest import CELL_BYTES
from ckpt.format.limits import BLOCK_BYTES

ROUND_BYTES = 96 << 20
"""The most bytes of blocks that a rank reads, sends and receives in one round."""

_MIN_READ_RATIO = 1.05  # reads are shared if the group would otherwise read this many times the needed bytes


class NeedRow(NamedTuple):
    """The bytes [begin, end) of a decoded block, which one rank needs."""

    pack: int
    """The number of the pack among those of the step."""
    position: int
    """The position of the block in the pack."""
    raw_bytes: int
    """The length of the decoded block."""
    stored_bytes: int
    """The bytes to read from the store for the whole block."""
    begin: int
    end: int


NeedRows = np.ndarray
"""The need rows of one rank as an int64 array with a column for each field, in the order on disk."""

BlockKey = tuple[int, int]
"""Pack and position of a block."""


class NeededRange(NamedTuple):
    """The bytes [begin, end) of a decoded block, which some rank needs."""

    begin: int
    end: int
    read_bytes: int
    """The bytes to read from the store for it."""
    ranks: Sequence[int]
    """The ranks that can read and verify it."""


class RankRange(NamedTuple):
    """The bytes [begin, end) of a decoded block, and the rank that needs, sends or receives them."""

    rank: int
    begin: int
    end: int


@dataclass(slots=True)
class BlockNeeds:
    """Which ranks need which bytes of one block."""

    raw_bytes: int
    stored_bytes: int
    """The bytes to read for the whole block."""
    whole_block_ranks: list[int] = field(default_factory=list)
    """The ranks that need the whole block."""
    partial_ranges: list[RankRange] = field(default_factory=list)
    """The parts that the other ranks need."""
    unshared_bytes: int = 0
    """The bytes that are read if each rank reads for itself."""
    _needed_ranges: list[NeededRange] | None = None

    def needed_ranges(self) -> list[NeededRange]:
        """Return the ranges to read, each byte once: the whole block if a rank needs it, else the ranges between the edges."""
        if self._needed_ranges is None:
            self._needed_ranges = self._find_needed_ranges()
        return self._needed_ranges

    def _find_needed_ranges(self) -> list[NeededRange]:
        if self.whole_block_ranks:
            return [NeededRange(0, self.raw_bytes, self.stored_bytes, self.whole_block_ranks)]
        changes: dict[int, list[int]] = {}  # at each edge, the ranks whose need begins or ends there
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
        """Yield the range that each rank needs."""
        yield from (RankRange(rank, 0, self.raw_bytes) for rank in self.whole_block_ranks)
        yield from self.partial_ranges


class ReadJob(NamedTuple):
    """The bytes [begin, end) of a decoded block, and the rank that reads them."""

    begin: int
    end: int
    reader: int


@dataclass(frozen=True, slots=True)
class SharedRead:
    """The schedule of one shared block: its round, which rank reads what, and which ranks need it.

    The jobs have the same order on all ranks.
    """

    round: int
    jobs: list[ReadJob]
    needs: BlockNeeds
    first_job: int
    """The number of its first job among the jobs of all blocks."""

    def sent_by(self, rank: int) -> Iterator[RankRange]:
        """Yield the receiving rank and the bytes of each message that a rank sends."""
        for begin, end, reader in self.jobs:
            if reader == rank:
                for taker, first, last in self.needs.ranges_by_rank():
                    if taker != rank and max(begin, first) < min(end, last):
                        yield RankRange(taker, max(begin, first), min(end, last))

    def received_by(self, rank: int, first: int, last: int) -> Iterator[RankRange]:
        """Yield the sending rank and the bytes of each message to a rank that needs the bytes [first, last)."""
        for begin, end, reader in self.jobs:
            if reader != rank and max(begin, first) < min(end, last):
                yield RankRange(reader, max(begin, first), min(end, last))


def needs_by_block(needs: Sequence[NeedRows]) -> dict[BlockKey, BlockNeeds]:
    """Return the needs of all ranks by block; `needs` has one array for each rank."""
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
    """Return the schedule of each block of which several of `size` ranks need the same bytes.

    A range is read by the rank that can read it and has the fewest bytes to read so far. A round is full for a rank at
    ROUND_BYTES.
    """
    bytes_to_read = [0] * size
    ranges_by_block: dict[BlockKey, list[NeededRange]] = {}
    for key in sorted(blocks):
        ranges = blocks[key].needed_ranges()
        if blocks[key].unshared_bytes > _total_read_bytes(ranges):
            ranges_by_block[key] = ranges
            continue
        for byte_range in ranges:
            bytes_to_read[byte_range.ranks[0]] += byte_range.read_bytes
    round_bytes = [0] * size
    found: dict[BlockKey, SharedRead] = {}
    count = 0
    for key, ranges in ranges_by_block.items():
        block = blocks[key]
        jobs: list[ReadJob] = []
        for begin, end, nbytes, ranks in ranges:
            before = jobs[-1] if jobs and jobs[-1].end == begin else None
            if before is not None and before.reader in ranks and nbytes <= CELL_BYTES:
                reader = before.reader  # the cell at a border: one call reads both ranges
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


def _total_read_bytes(byte_ranges: Sequence[NeededRange]) -> int:
    return sum(byte_range.read_bytes for byte_range in byte_ranges)


def is_worth_sharing(blocks: Mapping[BlockKey, BlockNeeds]) -> bool:
    """Return whether the group reads noticeably fewer bytes if ranks share their reads."""
    total = sum(block.unshared_bytes for block in blocks.values())
    return total > _MIN_READ_RATIO * sum(_total_read_bytes(block.needed_ranges()) for block in blocks.values())


def has_disjoint_needs(block: BlockNeeds) -> bool:
    """Return whether the ranks that need a block read different bytes of it, except the cells at their borders."""
    ranges = block.needed_ranges()
    return block.unshared_bytes <= _total_read_bytes(ranges) + (len(ranges) - 1) * CELL_BYTES


assert ROUND_BYTES > BLOCK_BYTES
