"""The threads that read the blocks of a read plan, each a contiguous part of about equal bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ckpt.block_io.read_plan import BlockRead
from ckpt.support.runtime import processor_count

READ_THREADS = 3
"""The most threads that read blocks. Reads through the page cache copy, so they use no more threads than there are cores; past
it, threads mostly wait."""

STREAM_THREADS = 16
"""The most threads that read past the page cache in chunks, counted over all ranks of a host if they share reads. Each waits
for one small read and needs little memory."""


def run_in_threads(reads: list[BlockRead], work: Callable[[Iterable[BlockRead]], None], max_threads: int | None = None) -> None:
    """Run `work` in threads on contiguous parts of about equal bytes; the first error stops all threads and is raised."""
    total = sum(w.row.stored for w in reads)
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
        done += block.row.stored
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(part: list[BlockRead]) -> None:
        try:
            work(_until_stopped(part, stop))
        except BaseException as error:
            errors.append(error)
            stop.set()

    workers = [threading.Thread(target=run, args=(p,), name="ckpt-read") for p in parts[1:]]
    for worker in workers:
        worker.start()
    run(parts[0])
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


def _until_stopped(part: list[BlockRead], stop: threading.Event) -> Iterator[BlockRead]:
    for block in part:
        if stop.is_set():
            return
        yield block
