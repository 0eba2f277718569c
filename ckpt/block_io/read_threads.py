"""The threads that read the blocks of a read plan: each a contiguous part of about equal bytes, or all from one queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ckpt.block_io.read_plan import BlockRead
from ckpt.storage.base.threads import WorkerThread, join_all
from ckpt.support.runtime import processor_count

READ_THREADS = 3
"""The most threads that read blocks. Reads through the page cache copy, so they use no more threads than there are cores; past
it, threads mostly wait."""


def run_in_threads(reads: list[BlockRead], work: Callable[[Iterable[BlockRead]], None], max_threads: int | None = None) -> None:
    """Run `work` in threads on contiguous parts of about equal bytes; the first error stops all threads and is raised."""
    total = sum(w.row.read_bytes for w in reads)
    if max_threads is None:
        max_threads = READ_THREADS if any(w.bypass_cache for w in reads) else min(READ_THREADS, processor_count())
    threads = max(1, min(max_threads, len(reads), total // (16 << 20)))
    if threads == 1:
        work(reads)
        return
    parts: list[list[BlockRead]] = [[] for _ in range(threads)]
    done = 0
    for block in reads:
        parts[min(threads - 1, done * threads // total)].append(block)
        done += block.row.read_bytes
    _run_threads([partial(_work_on_part, work, part) for part in parts])


def run_from_queue(reads: Sequence[BlockRead], work: Callable[[Iterable[BlockRead]], None], max_threads: int) -> None:
    """Run `work` in threads that take the next block from one queue; the first error stops all threads and is raised.

    So the blocks are read in about the order of the plan, and all threads end at about the same time.
    """
    threads = min(max_threads, len(reads))
    if threads <= 1:
        work(reads)
        return
    queue, lock = iter(reads), threading.Lock()

    def taken(stop: threading.Event) -> Iterator[BlockRead]:
        while not stop.is_set():
            with lock:
                block = next(queue, None)
            if block is None:
                return
            yield block

    _run_threads([lambda stop: work(taken(stop))] * threads)


def _run_threads(jobs: Sequence[Callable[[threading.Event], None]]) -> None:
    """Run each job in a thread, one of them in this. A job ends early when its argument is set; the first error is raised."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(job: Callable[[threading.Event], None]) -> None:
        try:
            job(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    workers = [WorkerThread(target=run, args=(job,), name="ckpt-read") for job in jobs[1:]]
    for worker in workers:
        worker.start()
    run(jobs[0])
    join_all(workers, lambda _: stop.set())  # after an interrupt, no thread may write into the arrays of the caller any more
    if errors:
        raise errors[0]


def _work_on_part(work: Callable[[Iterable[BlockRead]], None], part: list[BlockRead], stop: threading.Event) -> None:
    work(_until_stopped(part, stop))


def _until_stopped(part: list[BlockRead], stop: threading.Event) -> Iterator[BlockRead]:
    for block in part:
        if stop.is_set():
            return
        yield block
