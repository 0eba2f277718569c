"""Which part of a shard each of its copies writes. Pure, and computed by each rank alone from what all of them know.

Where the ranks that hold the copies are known, all shards with the same ranks are laid end to end, ordered by name and
place, and cut into as many equal ranges as there are ranks: one cut for thousands of leaves, and bytes even to within one
cut unit. The ranks of that set see exactly the same shards, since each names all who hold it. Where only the number of the
copies is known, two shards of the same number may be held by different ranks, so that each is cut by itself.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ckpt.state.boxes import Box, Replica, flat_boxes

CUT_BYTES = 4096
"""Bytes below which nothing is cut: a page."""

_MIN_ROWS_PER_SHARE = 50  # cuts move to the next row where that shifts less than one part in so many of a rank's share


class ShardReplica(NamedTuple):
    """A shard that this rank holds a copy of."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    replica: Replica


ShardRange = tuple[int, Box]
"""A box within a shard, contiguous in it, and its first element there."""


def own_ranges(shards: Sequence[ShardReplica | None]) -> list[list[ShardRange] | None]:
    """For each shard the ranges that this rank writes; None for all of it."""
    found: list[list[ShardRange] | None] = [None] * len(shards)
    by_rank_set: dict[tuple[int, ...], list[int]] = {}
    for i, shard in enumerate(shards):
        if shard is None or shard.replica.total == 1:
            continue
        if shard.replica.is_stored_whole:
            found[i] = [] if shard.replica.number else None
        elif shard.replica.ranks is not None:
            by_rank_set.setdefault(shard.replica.ranks, []).append(i)
        else:
            found[i] = _cut_by_itself(shard)
    for members in by_rank_set.values():
        _cut_for_rank_set(shards, sorted(members, key=lambda i: _shard_sort_key(shards[i])), found)
    return found


def _shard_sort_key(shard: ShardReplica | None) -> tuple[str, tuple[int, ...]]:
    assert shard is not None
    return shard.name, shard.offset


def _cut_for_rank_set(shards: Sequence[ShardReplica | None], members: list[int], found: list[list[ShardRange] | None]) -> None:
    """The share of one set of ranks: bytes [total · i / n, total · (i + 1) / n) of its shards end to end."""
    rank_set_shards = [s for i in members if (s := shards[i]) is not None]
    total = sum(s.nbytes for s in rank_set_shards)
    replica = rank_set_shards[0].replica
    low = total * replica.number // replica.total
    high = total * (replica.number + 1) // replica.total
    at = 0
    for i, shard in zip(members, rank_set_shards, strict=True):
        unit = _cut_unit(shard, total // replica.total)
        first, last = (_round_down(edge - at, shard, unit) for edge in (low, high))
        if (first, last) != (0, shard.nbytes):
            found[i] = _shard_ranges(shard, first, last)
        at += shard.nbytes


def _cut_by_itself(shard: ShardReplica) -> list[ShardRange]:
    """The share of a shard by itself. Small ones are not cut finer than a unit: who begins is drawn by the name."""
    count = shard.replica.total
    pieces = min(count, max(1, shard.nbytes // CUT_BYTES))
    start = zlib.crc32(f"{shard.name} {shard.offset}".encode()) % count if pieces < count else 0
    mine = (shard.replica.number - start) % count
    if mine >= pieces:
        return []
    unit = _cut_unit(shard, shard.nbytes // pieces)
    first, last = (_round_down(shard.nbytes * i // pieces, shard, unit) for i in (mine, mine + 1))
    return _shard_ranges(shard, first, last)


def _cut_unit(shard: ShardReplica, share: int) -> int:
    """Bytes at whose multiples a shard is cut: a row where rows are small, so that a range is one box."""
    row = math.prod(shard.shape[1:]) * shard.itemsize
    if row <= max(CUT_BYTES, share // _MIN_ROWS_PER_SHARE):
        return row * max(1, CUT_BYTES // row)
    return max(CUT_BYTES // shard.itemsize, 1) * shard.itemsize


def _round_down(edge: int, shard: ShardReplica, unit: int) -> int:
    return shard.nbytes if edge >= shard.nbytes else max(0, edge) // unit * unit


def _shard_ranges(shard: ShardReplica, first: int, last: int) -> list[ShardRange]:
    at = first // shard.itemsize
    found = []
    for box in flat_boxes(shard.shape, at, last // shard.itemsize):
        found.append((at, box))
        at += box.size
    return found
