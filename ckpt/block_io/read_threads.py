"""The threads that read the blocks of a read plan: each a contiguous part of about equal bytes, or all from one queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ckpt.block_io.read_plan import BlockRead
from ckpt.storage.base.threads import WorkerThread, join_all

READ_THREADS = 4
"""The most threads that read blocks, unless a tuner chooses their number. Each has a read-ahead of its own in Linux, and fewer
keep a disk waiting."""


def run_in_threads(reads: list[BlockRead], work: Callable[[Iterable[BlockRead]], None], max_threads: int | None = None) -> None:
    """Run `work` in threads on contiguous parts of about equal bytes; the first error stops all threads and is raised."""
    total = sum(w.row.read_bytes for w in reads)
    if max_threads is None:
        max_threads = READ_THREADS
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


def run_from_queue(
    reads: Sequence[BlockRead], work: Callable[[Iterable[BlockRead]], None], target_threads: Callable[[], int]
) -> None:
    """Run `work` in threads that take the next block from one queue; the first error stops all threads and is raised.

    So the blocks are read in about the order of the plan, and all threads end at about the same time.

    target_threads: returns how many threads are to read now. Threads are started and ended when it changes.
    """
    _QueueRun(reads, work, target_threads).run()


class _QueueRun:
    """One run of `run_from_queue`. `_lock` guards all that changes."""

    def __init__(
        self, reads: Sequence[BlockRead], work: Callable[[Iterable[BlockRead]], None], target_threads: Callable[[], int]
    ) -> None:
        self._work = work
        self._target_threads = target_threads
        self._lock = threading.Lock()
        self._queue = iter(reads)
        self._left = len(reads)
        self._threads = 1
        self._unjoined: list[WorkerThread] = []
        self._errors: list[BaseException] = []
        self._stop = threading.Event()

    def run(self) -> None:
        self._run_work(is_caller=True)
        try:
            while workers := self._take_unjoined():  # each may have started others
                join_all(workers, lambda _: self._stop.set())
        except BaseException:  # after an interrupt, no thread may write into the arrays of the caller any more
            while workers := self._take_unjoined():
                join_all(workers, lambda _: None)
            raise
        if self._errors:
            raise self._errors[0]

    def _take_unjoined(self) -> list[WorkerThread]:
        with self._lock:
            workers, self._unjoined = self._unjoined, []
        return workers

    def _run_work(self, is_caller: bool = False) -> None:
        try:
            self._work(self._taken(is_caller))
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def _taken(self, is_caller: bool) -> Iterator[BlockRead]:
        """Yield the next blocks, until there is none, or there are too many threads. The thread of the caller stays."""
        while not self._stop.is_set():
            with self._lock:
                target = self._target_threads()
                if self._threads > target and not is_caller:
                    self._threads -= 1
                    return
                block = next(self._queue, None)
                if block is None:
                    return
                self._left -= 1
                new = [
                    WorkerThread(target=self._run_work, name="ckpt-read")
                    for _ in range(min(target - self._threads, self._left))
                ]
                self._threads += len(new)
                for worker in new:  # within the lock: the caller joins only threads that were started
                    worker.start()
                    self._unjoined.append(worker)
            yield block


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
