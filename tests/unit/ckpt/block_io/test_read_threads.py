"""The threads that read blocks, in parts or from one queue: each block is read once; an error or interrupt ends all threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from ckpt.block_io.read_plan import BlockRead
from ckpt.block_io.read_threads import run_from_queue, run_in_threads
from ckpt.format.manifest_rows import Row
from ckpt.state.boxes import Box

Run = Callable[[list[BlockRead], Callable[[Iterable[BlockRead]], None]], None]


def block_at(position: int) -> BlockRead:
    nbytes = 1 << 20
    box = Box((0,), (nbytes,))
    return BlockRead(Row("w", "uint8", (nbytes,), box, "p", position, nbytes, nbytes, 0, nbytes, None, b"", None, b""))


BLOCKS = [block_at(i) for i in range(10_000)]


def run_with_target(target: int, reads: list[BlockRead], work: Callable[[Iterable[BlockRead]], None]) -> None:
    run_from_queue(reads, work, lambda: target)


RUNS = pytest.mark.parametrize(
    "run",
    [partial(run_in_threads, max_threads=4), partial(run_with_target, 4), partial(run_with_target, 8)],
    ids=["parts", "queue of 4", "queue of 8"],
)


def living_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckpt-read"]


def positions(blocks: Iterable[BlockRead]) -> list[int]:
    return [block.row.position for block in blocks]


@RUNS
def test_every_block_is_read_once(run: Run) -> None:
    found: list[BlockRead] = []
    run(BLOCKS, found.extend)
    assert sorted(positions(found)) == positions(BLOCKS)


def test_the_parts_of_threads_are_contiguous_and_of_about_equal_bytes() -> None:
    parts: list[list[int]] = []
    run_in_threads(BLOCKS, lambda blocks: parts.append(positions(blocks)), 4)
    assert [len(part) for part in parts] == [2500] * 4
    assert all(part == [*range(part[0], part[-1] + 1)] for part in parts)


def test_few_bytes_and_no_bytes_are_read_by_the_caller_alone() -> None:
    for blocks in (BLOCKS[:20], []):
        threads: list[int] = []
        run_in_threads(blocks, lambda blocks: threads.extend(threading.get_ident() for _ in blocks), 4)  # noqa: B023
        assert threads == [threading.get_ident()] * len(blocks)


@RUNS
def test_the_first_error_ends_all_threads(run: Run) -> None:
    done: list[BlockRead] = []

    def work(blocks: Iterable[BlockRead]) -> None:
        for block in blocks:
            if block.row.position == 20:
                raise OSError("the disk")
            done.append(block)
            time.sleep(0.001)

    with pytest.raises(OSError, match="the disk"):
        run(BLOCKS, work)
    assert len(done) < len(BLOCKS)
    assert not living_threads()


@RUNS
def test_an_interrupt_while_the_caller_waits_for_other_threads_ends_them(run: Run) -> None:
    caller = threading.current_thread()

    def work(blocks: Iterable[BlockRead]) -> None:
        for _ in blocks:
            if threading.current_thread() is caller:
                return  # the caller has nothing more to read, and waits
            time.sleep(0.01)

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run(BLOCKS, work)
    assert not living_threads(), "they still write into the arrays"


def test_threads_are_started_and_ended_as_their_target_number_changes() -> None:
    """A thread ends before it takes a block if there are too many. The rest of the blocks is read by those that are left."""
    target, lock, seen = 2, threading.Lock(), list[tuple[int, int]]()

    def work(blocks: Iterable[BlockRead]) -> None:
        nonlocal target
        for block in positions_one_by_one(blocks):
            with lock:
                target = 2 if block < 100 else 9 if block < 600 else 3
                seen.append((block, threading.get_ident()))
            time.sleep(0.0005)

    run_from_queue(BLOCKS[:1000], work, lambda: target)
    assert sorted(block for block, _ in seen) == [*range(1000)]
    threads = [
        len({thread for block, thread in seen if begin <= block < end}) for begin, end in ((0, 100), (200, 600), (700, 1000))
    ]
    assert threads == [2, 9, 3]
    assert not living_threads()


def positions_one_by_one(blocks: Iterable[BlockRead]) -> Iterable[int]:
    return (block.row.position for block in blocks)
