"""Who reads what for whom, where several ranks need the same bytes. Pure, and the same on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpt.digest import CELL_BYTES
from ckpt.limits import BLOCK_BYTES

ROUND_BYTES = 96 << 20
"""Blocks that a rank reads, sends and receives in one round."""

_WORTH = 1.05  # what the group reads over what there is, from which on sharing begins

Need = np.ndarray
"""Rows of (pack, position, raw bytes, stored bytes, from, to), one a stretch, in the order in which they lie."""

COLUMNS = 6

Key = tuple[int, int]
"""Pack and position of a block."""


class Stretch(NamedTuple):
    """Bytes [begin, end) of a raw block."""

    begin: int
    end: int
    nbytes: int
    """To be read for it."""
    ranks: Sequence[int]
    """Those that can read and verify it."""


class Part(NamedTuple):
    """A part that a rank needs of a block that it does not need whole, from and to."""

    rank: int
    begin: int
    end: int


@dataclass(slots=True)
class Block:
    """What the ranks need of one block."""

    raw: int
    stored: int
    """The bytes to read for all of it."""
    whole: list[int] = field(default_factory=list)
    """The ranks that need all of it."""
    parts: list[Part] = field(default_factory=list)
    alone: int = 0
    """The bytes that are read where each rank reads for itself."""
    _united: list[Stretch] | None = None

    def united(self) -> list[Stretch]:
        """What is to be read of it, each byte once. All of it where a rank needs it all; else what lies between two edges."""
        if self._united is None:
            self._united = self._unite()
        return self._united

    def _unite(self) -> list[Stretch]:
        if self.whole:
            return [Stretch(0, self.raw, self.stored, self.whole)]
        changes: dict[int, list[int]] = {}  # at each edge the ranks that want what follows, if they did not before
        for rank, begin, end in self.parts:
            changes.setdefault(begin, []).append(rank)
            changes.setdefault(end, []).append(rank)
        found, ranks = [], set[int]()
        for begin, end in itertools.pairwise(sorted(changes)):
            ranks.symmetric_difference_update(changes[begin])
            if ranks:
                found.append(Stretch(begin, end, end - begin, sorted(ranks)))
        return found

    def takers(self) -> Iterator[Part]:
        """What each rank needs of it."""
        yield from (Part(rank, 0, self.raw) for rank in self.whole)
        yield from self.parts


class Job(NamedTuple):
    """A stretch of a block, and who reads it."""

    begin: int
    end: int
    reader: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One block on its way: when, who reads what of it, and who needs it. Jobs are in the same order on all ranks."""

    round: int
    jobs: list[Job]
    block: Block
    first: int
    """The number of its first job, of those of all blocks."""

    def sent_by(self, rank: int) -> Iterator[Part]:
        """What a rank sends, and to whom."""
        for begin, end, reader in self.jobs:
            if reader == rank:
                for taker, first, last in self.block.takers():
                    if taker != rank and max(begin, first) < min(end, last):
                        yield Part(taker, max(begin, first), min(end, last))

    def received_by(self, rank: int, first: int, last: int) -> Iterator[Part]:
        """What a rank that needs these bytes receives, and from whom."""
        for begin, end, reader in self.jobs:
            if reader != rank and max(begin, first) < min(end, last):
                yield Part(reader, max(begin, first), min(end, last))


def blocks_of(needs: Sequence[Need]) -> dict[Key, Block]:
    """What the ranks need, by block."""
    found: dict[Key, Block] = {}
    for rank, need in enumerate(needs):
        for pack, position, raw, stored, begin, end in need.tolist():
            if (block := found.get((pack, position))) is None:
                block = found[pack, position] = Block(raw, stored)
            block.alone += stored if end - begin == raw else end - begin
            if end - begin == raw:
                block.whole.append(rank)
            else:
                block.parts.append(Part(rank, begin, end))
    return found


def schedule(blocks: Mapping[Key, Block], size: int) -> dict[Key, Turn]:
    """The turn of each block of which several of `size` ranks need the same bytes. Pure; the same on every rank.

    Of those that can read a stretch it is read by the one that has the fewest bytes to read so far. A round is full for a
    rank at ROUND_BYTES.
    """
    load = [0] * size
    shared: dict[Key, list[Stretch]] = {}
    for key in sorted(blocks):
        united = blocks[key].united()
        if blocks[key].alone > _bytes(united):
            shared[key] = united
            continue
        for stretch in united:
            load[stretch.ranks[0]] += stretch.nbytes
    held = [0] * size
    found: dict[Key, Turn] = {}
    count = 0
    for key, united in shared.items():
        block = blocks[key]
        jobs: list[Job] = []
        for begin, end, nbytes, ranks in united:
            before = jobs[-1] if jobs and jobs[-1].end == begin else None
            if before is not None and before.reader in ranks and nbytes <= CELL_BYTES:
                reader = before.reader  # the cell at a border: one read of two stretches costs one call
            else:
                reader = min(ranks, key=lambda r: (load[r], before is None or r != before.reader, r))
            load[reader] += nbytes
            if before is not None and before.reader == reader:
                jobs[-1] = Job(before.begin, end, reader)
            else:
                jobs.append(Job(begin, end, reader))
        takers = [part.rank for part in block.takers()]
        first = max(held[rank] for rank in takers)
        if first % ROUND_BYTES + block.raw > ROUND_BYTES:
            first = (first // ROUND_BYTES + 1) * ROUND_BYTES
        for rank in takers:
            held[rank] = first + block.raw
        found[key] = Turn(first // ROUND_BYTES, jobs, block, count)
        count += len(jobs)
    return found


def _bytes(stretches: Sequence[Stretch]) -> int:
    return sum(stretch.nbytes for stretch in stretches)


def saves_reading(blocks: Mapping[Key, Block]) -> bool:
    """Whether the group reads much less where ranks read for each other."""
    total = sum(block.alone for block in blocks.values())
    return total > _WORTH * sum(_bytes(block.united()) for block in blocks.values())


def is_divided(block: Block) -> bool:
    """Whether ranks that need a block read different bytes of it, but for the cells at their borders."""
    united = block.united()
    return block.alone <= _bytes(united) + (len(united) - 1) * CELL_BYTES


assert ROUND_BYTES > BLOCK_BYTES
