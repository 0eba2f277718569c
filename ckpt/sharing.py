"""Reading shared by the ranks of a group: a block that several need is read by one of them and handed to the others.

All ranks tell what they need, and each computes the same schedule from that. Blocks go round by round, so that no rank
holds more than some blocks beside its own shard. Whoever gets a block verifies it, whether from the store or from a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ckpt.digest import CELL_BYTES
from ckpt.groups.base import Group
from ckpt.leaves.base import Bytes
from ckpt.manifest import Row
from ckpt.places import copies_of
from ckpt.plan import BLOCK_BYTES
from ckpt.read import READ_THREADS, Progress, Wanted, Worker, read_blocks
from ckpt.storage.base import Store
from ckpt.storage.local import LocalStore

ShareReads = bool | Literal["auto"]

ROUND_BYTES = 96 << 20
"""Blocks that a rank reads, sends and receives in one round."""

_WORTH = 1.05  # what the group reads over what there is, from which on sharing begins

Need = np.ndarray
"""Rows of (pack, position, raw bytes, bytes to read), one a block, in the order of the blocks."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One block on its way: who reads it, and who gets it."""

    round: int
    reader: int
    takers: tuple[int, ...]


def read_together(
    store: Store, algorithm: str, order: list[Wanted], packs: Sequence[str], where: str, group: Group,
    share: ShareReads, progress: Progress | None = None, *, once: bool = False,
) -> None:  # fmt: skip
    """Like `read_blocks`, on every rank of a group. Every rank must come, whatever it needs.

    once: past the page cache, where no other rank is known to need a block from it.
    """
    if share is False or group.size == 1 or not group.can_exchange:
        for block in order:
            block.once = once and group.size == 1
        read_blocks(store, algorithm, order, where, progress)
        return
    number = {name: i for i, name in enumerate(packs)}
    mine = np.array([(number[w.row.pack or ""], w.row.position, w.row.raw, _bytes(w)) for w in order], np.int64)
    needs = [np.frombuffer(data, np.int64).reshape(-1, 4) for data in group.all_gather(mine.tobytes())]
    keys = [(int(a), int(b)) for a, b, _, _ in mine.reshape(-1, 4)]
    by_key = dict(zip(keys, order, strict=True))
    shared = share != "auto" or _is_worth_it(store, group, needs)
    if once:
        readers = {} if shared else _readers(needs)
        for key, block in by_key.items():
            block.once = shared or _is_divided(block.row, *readers[key])
    if not shared:
        read_blocks(store, algorithm, order, where, progress)
        return
    turns = schedule(needs)
    failed: list[Exception] = []
    try:
        read_blocks(store, algorithm, [w for k, w in by_key.items() if k not in turns], where, progress)
    except Exception as error:  # the others wait for what this rank is to read
        failed.append(error)
    rounds = 1 + max((t.round for t in turns.values()), default=-1)
    by_round: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
    for key, turn in turns.items():
        if group.rank in turn.takers:
            by_round[turn.round].append(key)
    for keys in by_round:
        _round(store, algorithm, where, progress, group, [(by_key[k], turns[k]) for k in keys], failed)
    if failed:
        raise failed[0]


def _round(
    store: Store, algorithm: str, where: str, progress: Progress | None, group: Group,
    jobs: list[tuple[Wanted, Turn]], failed: list[Exception],
) -> None:  # fmt: skip
    """Read what is this rank's, hand over, put in place. Goes on after an error: the others count on the messages."""
    buffers: list[Bytes] = [np.empty(block.row.raw, np.uint8) for block, _ in jobs]

    own = threading.local()  # a worker's memory is used again

    def read(i: int) -> None:
        try:
            if not hasattr(own, "worker"):
                own.worker = Worker(store, algorithm, where, progress)
            own.worker.fetch(jobs[i][0], buffers[i])
        except Exception as error:
            failed.append(error)

    def accept(i: int) -> None:
        try:
            Worker(store, algorithm, where, None).accept(jobs[i][0], buffers[i])
        except Exception as error:
            failed.append(error)

    with ThreadPoolExecutor(READ_THREADS, "ckpt-read") as pool:
        list(pool.map(read, [i for i, (_, turn) in enumerate(jobs) if turn.reader == group.rank]))
        send = [
            (peer, buffer.data)
            for (_, turn), buffer in zip(jobs, buffers, strict=True)
            if turn.reader == group.rank
            for peer in turn.takers
            if peer != group.rank
        ]
        receive = [
            (turn.reader, buffer.data) for (_, turn), buffer in zip(jobs, buffers, strict=True) if turn.reader != group.rank
        ]
        group.exchange(send, receive)
        list(pool.map(accept, range(len(jobs))))


def schedule(needs: Sequence[Need]) -> dict[tuple[int, int], Turn]:
    """The turn of each block that more than one rank needs. Pure; the same on every rank.

    The reader is the taker that has the fewest bytes to read so far. A round is full for a rank at ROUND_BYTES.
    """
    takers: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    load = [0] * len(needs)
    for rank, need in enumerate(needs):
        for pack, position, raw, nbytes in need.tolist():
            takers.setdefault((pack, position), []).append(rank)
            sizes[pack, position] = raw
            load[rank] += nbytes
    for key, ranks in takers.items():
        if len(ranks) > 1:
            for rank in ranks:
                load[rank] -= sizes[key]
    held = [0] * len(needs)
    found: dict[tuple[int, int], Turn] = {}
    for key in sorted(takers):
        ranks = takers[key]
        if len(ranks) == 1:
            continue
        reader = min(ranks, key=lambda r: (load[r], r))
        load[reader] += sizes[key]
        begin = max(held[r] for r in ranks)
        size = max(1, sizes[key])
        if begin % ROUND_BYTES + size > ROUND_BYTES:
            begin = (begin // ROUND_BYTES + 1) * ROUND_BYTES
        for rank in ranks:
            held[rank] = begin + size
        found[key] = Turn(begin // ROUND_BYTES, reader, tuple(ranks))
    return found


def _is_worth_it(store: Store, group: Group, needs: Sequence[Need]) -> bool:
    total = sum(int(need[:, 3].sum()) for need in needs)
    unique: dict[tuple[int, int], int] = {}
    for need in needs:
        for pack, position, raw, nbytes in need.tolist():
            unique[pack, position] = min(raw, unique.get((pack, position), 0) + nbytes)
    if total <= _WORTH * sum(unique.values()):
        return False
    # On one host they share the page cache, which is faster than any message.
    return not (all(isinstance(copy, LocalStore) for copy in copies_of(store)) and group.one_host())


def _readers(needs: Sequence[Need]) -> dict[tuple[int, int], tuple[int, int]]:
    """Of each block, how many ranks need it, and the bytes that they read if each reads for itself."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for need in needs:
        for pack, position, _, nbytes in need.tolist():
            ranks, read = found.get((pack, position), (0, 0))
            found[pack, position] = ranks + 1, read + nbytes
    return found


def _is_divided(row: Row, ranks: int, read: int) -> bool:
    """Whether ranks that need a block read different bytes of it, but for the cells at their borders."""
    return ranks == 1 or (row.codec is None and read <= row.raw + ranks * CELL_BYTES)


def _bytes(block: Wanted) -> int:
    """What reading this block costs alone: a box of an uncompressed block needs some of its cells only."""
    row = block.row
    if row.codec is not None or len(block.pieces) > 1:
        return row.stored
    return block.pieces[0].span_bytes()


assert ROUND_BYTES > BLOCK_BYTES
