"""Reads shared by the ranks of a group: one rank reads bytes that several need, and passes them on.

All ranks exchange what they need, and each computes the same schedule (`shared_read_schedule.py`). Ranks of one host pass bytes
through shared memory (`shared_window.py`), other ranks by messages in rounds, so that a rank has only some blocks in memory
besides its own shards. Each rank verifies all bytes that it gets, from the store or from another rank. A rank can verify only
what it needs itself: the cells of its range, or a whole block. So the reader of a range is always a rank that needs all of it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ckpt.block_io.block_reader import BlockReader, read_blocks
from ckpt.block_io.read_plan import BlockRead
from ckpt.block_io.replicated_store import copies_of
from ckpt.block_io.tuned_read_threads import ReadKind, most_threads, read_kind
from ckpt.groups.base import Group, Message, ranks_text
from ckpt.loading.shared_read_schedule import (
    BlockKey,
    NeedRow,
    NeedRows,
    ReadJob,
    SharedRead,
    has_disjoint_needs,
    is_worth_sharing,
    needs_by_block,
    schedule_shared_reads,
)
from ckpt.loading.shared_window import RankFailed, SharedWindow
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.store import ByteProgress, Store
from ckpt.storage.base.threads import DaemonThreadPool
from ckpt.storage.local.directory import LocalStore

ShareReads = bool | Literal["auto"]

_MIN_THREADS = 3
"""The least number of threads of one rank. The ranks of a host read at the same time, so one needs fewer than alone."""

MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 64 << 20, 128 << 20
"""The least and the most shared memory of the ranks of one host; between these limits, two blocks for each rank."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """From where the blocks of one step are read."""

    store: Store
    algorithm: str
    """The digest algorithm of the step."""
    where: str
    """The step, for messages."""
    progress: ByteProgress | None = None
    """Called with the number of bytes just read from the store."""

    def read(self, read_plan: list[BlockRead]) -> None:
        """Read blocks without another rank."""
        read_blocks(self.store, self.algorithm, read_plan, self.where, self.progress)

    def reader(self, kind: ReadKind | None = None) -> BlockReader:
        """Return the reader with which one thread reads from the store. kind: see `BlockReader`."""
        return BlockReader(self.store, self.algorithm, self.where, self.progress, kind)

    def acceptor(self) -> BlockReader:
        """Return the reader with which one thread takes over bytes that were read already."""
        return BlockReader(self.store, self.algorithm, self.where, None)


def read_shared(
    source: BlockSource,
    read_plan: list[BlockRead],
    packs: Sequence[str],
    group: Group,
    share: ShareReads,
    *,
    bypass_cache: bool = False,
) -> None:
    """Read blocks as `read_blocks` does, with shared reads. Every rank of the group must call it, whatever it needs.

    packs: the names of all packs of the step, in the same order on all ranks.
    bypass_cache: whether to bypass the page cache for bytes that no other rank of this host reads. The field of this name of
        each read is set.

    Call it only inside `run_on_all_ranks`. If another rank fails, this may return early, or raise IntegrityError for bytes that
    were never sent; `run_on_all_ranks` then raises the error of that rank on all ranks.

    Raises InvalidArgument if `share` differs between ranks, IntegrityError for damaged bytes, and StoreError or GroupError.
    """
    one_host = group.size > 1 and group.one_host()  # a collective call, so it must precede any decision that may differ by rank
    if group.size == 1 or not (group.can_exchange or one_host):
        for block in read_plan:
            block.bypass_cache = bypass_cache and group.size == 1
        source.read(read_plan)
        return
    number = {name: i for i, name in enumerate(packs)}
    keys = [(number[read.row.pack or ""], read.row.position) for read in read_plan]
    shareable = zip(keys, read_plan, strict=True) if share is not False else ()
    rows = [
        NeedRow(*key, read.row.raw, read.row.whole_read_bytes, begin, end)
        for key, read in shareable
        for begin, end in read.raw_ranges()
    ]
    facts, needs = _gather_needs(group, _rank_read_facts(source.store, share, bypass_cache), np.array(rows, np.int64))
    by_key = dict(zip(keys, read_plan, strict=True))
    blocks = needs_by_block(needs)
    saves_enough = is_worth_sharing(blocks)
    has_common_page_cache = one_host and all(rank_facts.is_local for rank_facts in facts)
    shared_reads = schedule_shared_reads(blocks, group.size) if _is_shared(facts, saves_enough, has_common_page_cache) else {}
    window = _open_window(shared_reads, group) if one_host else None
    by_messages = bool(shared_reads) and window is None and group.can_exchange and (share is True or not has_common_page_cache)
    if bypass_cache:
        for key, block_read in by_key.items():
            block_read.bypass_cache = share is not False and (
                window is not None or by_messages or not saves_enough or has_disjoint_needs(blocks[key])
            )
    shared_blocks = [SharedBlock(by_key.get(key), shared_read) for key, shared_read in shared_reads.items()]
    own_reads = [read for key, read in by_key.items() if key not in shared_reads]
    if window is not None:
        with window:
            completed = _read_through_window(window, source, group, shared_blocks)
        if completed:
            source.read(own_reads)
    elif by_messages:
        _read_by_messages(source, group, shared_blocks, own_reads)
    else:
        source.read(read_plan)


class SharedBlock(NamedTuple):
    """A block that several ranks need."""

    own_read: BlockRead | None
    """What this rank needs of it; None for nothing."""
    shared_read: SharedRead


class RankReadFacts(NamedTuple):
    """What a rank contributes to the decision how to read. All ranks know the facts of all, and so decide alike."""

    share: int
    """The argument share_reads: 0 for False, 1 for True, 2 for "auto"."""
    is_local: int
    """Whether all copies that it would read are in local folders."""
    bypasses_cache: int
    """Whether it would bypass the page cache."""


def _rank_read_facts(store: Store, share: ShareReads, bypass_cache: bool) -> RankReadFacts:
    copies = copies_of(store)
    local = all(isinstance(copy, LocalStore) for copy in copies)
    return RankReadFacts(2 if share == "auto" else int(share), int(local), int(bypass_cache and copies[0].past_cache))


def _gather_needs(group: Group, facts: RankReadFacts, needs: NeedRows) -> tuple[list[RankReadFacts], list[NeedRows]]:
    """Return the facts and the needs of each rank. Raises InvalidArgument if share_reads differs between ranks."""
    answers = [np.frombuffer(data, np.int64) for data in group.all_gather(np.append(np.array(facts), needs).tobytes())]
    found = [RankReadFacts(*answer[: len(facts)].tolist()) for answer in answers]
    if other := [rank for rank, rank_facts in enumerate(found) if rank_facts.share != found[0].share]:
        named = {0: "False", 1: "True", 2: "'auto'"}
        raise InvalidArgument(
            f"share_reads={named[found[0].share]} on rank 0 and {named[found[other[0]].share]} on {ranks_text(other)}; "
            "give all ranks the same"
        )
    return found, [answer[len(facts) :].reshape(-1, len(NeedRow._fields)) for answer in answers]


def _is_shared(facts: Sequence[RankReadFacts], saves_enough: bool, has_common_page_cache: bool) -> bool:
    """Return whether ranks share reads. This is a pure function.

    saves_enough: whether sharing saves a noticeable part of the reads.
    has_common_page_cache: whether all ranks read local folders of one host. Then each rank copies from the page cache itself,
        unless reads bypass it.
    """
    if facts[0].share != 2:
        return facts[0].share == 1
    return saves_enough and (not has_common_page_cache or all(rank_facts.bypasses_cache for rank_facts in facts))


def _open_window(shared_reads: Mapping[BlockKey, SharedRead], group: Group) -> SharedWindow | None:
    """Return shared memory for the shared blocks; None if there are none, or the ranks of this host can't share memory."""
    if not shared_reads:
        return None
    largest = max(shared_read.needs.raw_bytes for shared_read in shared_reads.values())
    slots = min(max(2 * group.size * largest, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES) // largest
    if slots < 2:  # blocks larger than this version writes
        return None
    return SharedWindow.create(
        group, min(slots, len(shared_reads)), largest, sum(len(shared_read.jobs) for shared_read in shared_reads.values())
    )


class _OwnJob(NamedTuple):
    """A job of this rank, which it reads into the window."""

    block: int
    """The index of the shared block."""
    block_read: BlockRead
    number: int
    """The index of the job in the window."""
    job: ReadJob


def _read_through_window(window: SharedWindow, source: BlockSource, group: Group, shared_blocks: list[SharedBlock]) -> bool:
    """Read the jobs of this rank into the window, and copy what it needs from there, while the other ranks do the same.

    Returns whether all bytes have arrived; False if another rank failed.
    """
    own_jobs = [
        _OwnJob(block, block_read, number, job)
        for block, (block_read, shared_read) in enumerate(shared_blocks) if block_read is not None
        for number, job in enumerate(shared_read.jobs, shared_read.first_job) if job.reader == group.rank
    ]  # fmt: skip
    kind = read_kind(source.store, *(own.block_read for own in own_jobs))
    threads = max(_MIN_THREADS, most_threads(source.store, kind) // group.size)
    remaining_jobs, lock = iter(own_jobs), threading.Lock()
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            window.mark_failed()

    def read_and_place(pool: DaemonThreadPool) -> None:
        for _ in range(min(threads, len(own_jobs))):
            pool.submit(guarded, lambda: _fill_window(window, source.reader(kind), remaining_jobs, lock))
        _place_from_window(window, source, shared_blocks)

    try:
        with DaemonThreadPool(threads, "ckpt-read") as pool:
            guarded(lambda: read_and_place(pool))
        for error in errors:
            if not isinstance(error, RankFailed):
                raise error
        return not errors
    finally:
        for error in errors:
            traceback.clear_frames(error.__traceback__)  # otherwise the error would keep the shared memory mapped
        errors.clear()


def _fill_window(window: SharedWindow, reader: BlockReader, jobs: Iterator[_OwnJob], lock: threading.Lock) -> None:
    """Read jobs into the window until there are no more.

    lock: guards `jobs`, from which several threads take.
    """
    with reader:
        while True:
            with lock:  # also while this waits for a slot, so that jobs get slots in the order of blocks
                own = next(jobs, None)
                if own is None:
                    return
                slot = window.wait_for_free_slot(own.block)
            reader.fetch(own.block_read, own.job.begin, own.job.end, slot[own.job.begin : own.job.end])
            window.mark_ready(own.number)


def _place_from_window(window: SharedWindow, source: BlockSource, shared_blocks: list[SharedBlock]) -> None:
    """Copy what this rank needs to its targets, block by block as they are ready."""
    acceptor = source.acceptor()
    for block, (block_read, shared_read) in enumerate(shared_blocks):
        if block_read is not None:
            for begin, end in block_read.raw_ranges():
                for number, job in enumerate(shared_read.jobs, shared_read.first_job):
                    if max(begin, job.begin) < min(end, job.end):
                        window.wait_until_ready(number, job.reader)
                acceptor.accept(block_read, begin, window.slot(block)[begin:end])
        window.release(block)


def _read_by_messages(source: BlockSource, group: Group, shared_blocks: list[SharedBlock], own_reads: list[BlockRead]) -> None:
    """Read the blocks that no other rank needs, then the shared blocks round by round."""
    failed: list[Exception] = []
    try:
        source.read(own_reads)
    except Exception as error:  # continue, because the other ranks wait for messages of this rank
        failed.append(error)
    rounds = 1 + max(block.shared_read.round for block in shared_blocks)
    by_round: list[list[tuple[BlockRead, SharedRead]]] = [[] for _ in range(rounds)]
    for block_read, shared_read in shared_blocks:
        if block_read is not None:
            by_round[shared_read.round].append((block_read, shared_read))
    for of_round in by_round:
        _run_round(source, group, of_round, failed)
    if failed:
        raise failed[0]


def _run_round(
    source: BlockSource, group: Group, shared_reads: list[tuple[BlockRead, SharedRead]], failed: list[Exception]
) -> None:
    """Read the jobs of this rank, exchange messages, and copy the bytes to their targets.

    An error is added to `failed` and does not end the round, because the other ranks wait for the messages.
    """
    rank = group.rank
    buffers = [[(first, np.empty(last - first, np.uint8)) for first, last in block.raw_ranges()] for block, _ in shared_reads]

    def within(i: int, begin: int, end: int) -> Bytes:
        first, buffer = next(it for it in reversed(buffers[i]) if it[0] <= begin)
        return buffer[begin - first : end - first]

    own, readers = threading.local(), ExitStack()  # each thread reuses the memory of its reader

    def read(i: int, job: ReadJob) -> None:
        try:
            if not hasattr(own, "reader"):
                own.reader = readers.enter_context(source.reader(kind))
            own.reader.fetch(shared_reads[i][0], job.begin, job.end, within(i, job.begin, job.end))
        except Exception as error:
            failed.append(error)

    def accept(i: int) -> None:
        try:
            for first, buffer in buffers[i]:
                source.acceptor().accept(shared_reads[i][0], first, buffer)
        except Exception as error:
            failed.append(error)

    reads = [(i, job) for i, (_, shared_read) in enumerate(shared_reads) for job in shared_read.jobs if job.reader == rank]
    kind = read_kind(source.store, *(shared_reads[i][0] for i, _ in reads))
    threads = max(_MIN_THREADS, min(most_threads(source.store, kind), len(reads)))
    with readers, DaemonThreadPool(threads, "ckpt-read") as pool:  # the threads end before their readers
        list(pool.map(lambda it: read(*it), reads))
    send: list[Message] = []
    receive: list[Message] = []
    for i, (block, shared_read) in enumerate(shared_reads):  # messages have the same order on both sides
        send += [(peer, within(i, begin, end).data) for peer, begin, end in shared_read.sent_by(rank)]
        for byte_range in block.raw_ranges():
            receive += [(peer, within(i, begin, end).data) for peer, begin, end in shared_read.received_by(rank, *byte_range)]
    group.exchange(send, receive)
    with DaemonThreadPool(threads, "ckpt-read") as pool:
        list(pool.map(accept, range(len(shared_reads))))
