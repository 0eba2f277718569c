"""The threads that read the blocks of a read plan: each a contiguous part of about equal bytes, or all from one queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from ckpt.block_io.read_plan import BlockRead
from ckpt.storage.base.threads import WorkerThread, join_all, try_start

_MIN_PART_BYTES = 16 << 20
"""A thread for fewer bytes than this costs more than it saves."""

_Work = Callable[[Iterable[BlockRead]], None]


def run_in_threads(reads: Sequence[BlockRead], work: _Work, max_threads: int) -> None:
    """Run `work` in threads on contiguous parts of about equal bytes; the first error stops all threads and is raised."""
    total = sum(block.row.whole_read_bytes for block in reads)
    threads = max(1, min(max_threads, len(reads), total // _MIN_PART_BYTES))
    parts: list[list[BlockRead]] = [[] for _ in range(threads)]
    done = 0
    for block in reads:
        parts[min(threads - 1, done * threads // max(1, total))].append(block)
        done += block.row.whole_read_bytes
    _ReadThreads(work).run(*parts)


def run_from_queue(reads: Sequence[BlockRead], work: _Work, target_threads: Callable[[], int]) -> None:
    """Run `work` in threads that take the next block from one queue; the first error stops all threads and is raised.

    So the blocks are read in about the order of the plan, and all threads end at about the same time.

    target_threads: returns how many threads are to read now. Threads are started and ended when it changes.
    """
    queue = _Queue(reads, _ReadThreads(work), target_threads)
    queue.threads.run(queue.blocks(is_caller=True))


class _ReadThreads:
    """The threads of one run, among them that of the caller; the first error stops all."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        """Guards `_unjoined`. A thread starts while it is held, so the caller joins only threads that run."""
        self._unjoined: list[WorkerThread] = []
        self._errors: list[BaseException] = []
        """Each thread appends its error, without a lock; the caller reads the list after all threads have ended."""
        self._stop = threading.Event()

    def start(self, blocks: Iterable[BlockRead]) -> bool:
        """Start a thread that reads these blocks; return False if the system refuses it."""
        worker = WorkerThread(target=self._read, args=(blocks,), name="ckpt-read")
        with self._lock:
            self._unjoined.append(worker)
            return try_start(worker)

    def run(self, own: Iterable[BlockRead], *others: Iterable[BlockRead]) -> None:
        """Read blocks in this thread, and the others in one thread each; return when all threads have ended."""
        try:
            refused = [blocks for blocks in others if not self.start(blocks)]
            self._read(chain(own, *refused))
            while workers := self._take_unjoined():  # each may have started others
                join_all(workers, lambda _: self._stop.set())
        except BaseException:  # after an interrupt, no thread may write into the arrays of the caller any more
            self._stop.set()
            while workers := self._take_unjoined():
                join_all(workers, lambda _: None)
            raise
        if self._errors:
            raise self._errors[0]

    def _take_unjoined(self) -> list[WorkerThread]:
        with self._lock:
            workers, self._unjoined = self._unjoined, []
        return workers

    def _read(self, blocks: Iterable[BlockRead]) -> None:
        try:
            self._work(self._until_stopped(iter(blocks)))
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def _until_stopped(self, blocks: Iterator[BlockRead]) -> Iterator[BlockRead]:
        while not self._stop.is_set() and (block := next(blocks, None)) is not None:
            yield block


class _Queue:
    """The blocks that no thread has taken yet."""

    def __init__(self, reads: Sequence[BlockRead], threads: _ReadThreads, target_threads: Callable[[], int]) -> None:
        self.threads = threads
        self._target_threads = target_threads
        self._lock = threading.Lock()
        """Guards `_blocks`, `_left` and `_running`."""
        self._blocks = iter(reads)
        self._left = len(reads)
        self._running = 1

    def blocks(self, is_caller: bool = False) -> Iterator[BlockRead]:
        """Yield the next blocks, until there is none, or there are too many threads. The thread of the caller stays."""
        while True:
            with self._lock:
                target = self._target_threads()
                if self._running > target and not is_caller:
                    self._running -= 1
                    return
                block = next(self._blocks, None)
                if block is None:
                    return
                self._left -= 1
                for _ in range(min(target - self._running, self._left)):
                    if not self.threads.start(self.blocks()):
                        break
                    self._running += 1
            yield block
