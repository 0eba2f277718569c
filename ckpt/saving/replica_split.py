"""Pure functions that decide which part of a shard each of its replicas writes, without communication.

If the ranks of the replicas are known, all shards with the same set of ranks are placed end to end, in the order of name and
offset, and cut into as many equal ranges as there are ranks. So there is one cut for thousands of leaves, and the bytes of the
ranks differ by at most one cut unit. All ranks of such a set see the same shards, because each shard names all its ranks. If
only the number of replicas is known, two shards with the same number may be on different ranks. So each of those is cut by
itself.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ckpt.state.boxes import Box, Replica, flat_boxes

CUT_BYTES = 4096
"""The smallest range in bytes that results from a cut: a page."""

_MIN_ROWS_PER_SHARE = 50  # a cut moves to the start of a row if a share has at least this many rows


class ShardReplica(NamedTuple):
    """A shard of which this rank has a replica."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    replica: Replica


ShardRange = tuple[int, Box]
"""The index of the first element in the flattened shard, and a box within the shard that is contiguous there."""


def own_ranges(shards: Sequence[ShardReplica | None]) -> list[list[ShardRange] | None]:
    """Return, for each shard, the ranges that this rank writes; None for the whole shard."""
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
    """Set the ranges of rank i in a set of n ranks: bytes [total · i / n, total · (i + 1) / n) of its shards end to end."""
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
    """Return this rank's ranges of one shard. A small shard has fewer parts than replicas; its name decides who writes them."""
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
    """Return the bytes at whose multiples a shard is cut: whole rows if they are small, so that a range is one box."""
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
