"""The first stage of a save: copies blocks from the state into an arena, and passes them to the writers.

A blocking save stages in one thread, in parallel with the writers. An asynchronous save stages in the caller and helper
threads before the writers begin, and stages deferred blocks later. If the arena is full, staging waits until the writers
return regions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt.block_io.staging_arena import Region
from ckpt.errors import StagingFailed
from ckpt.format.digest import digest_and_cells
from ckpt.saving.attempt_failure import AttemptFailure
from ckpt.saving.block_plan import Block, stage_block
from ckpt.saving.change_detection import BlockSample, first_changed_leaf
from ckpt.saving.deferred_blocks import DeferredBlocks, changed_error
from ckpt.saving.save_plan import SavePlan
from ckpt.saving.staging_memory import StagingMemory
from ckpt.state.leaves.base import is_limited_by_launches
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.threads import WorkerThread, join_all, start_available
from ckpt.support.runtime import processor_count


class StagedBlock(NamedTuple):
    """A block in the arena."""

    number: int
    """The index of the block in the plan."""
    region: Region
    sums: tuple[bytes, bytes] | None
    """Its digest and the checksums of its cells; None if they are not computed yet."""


class StagedBlocks:
    """The queue from the staging threads to the writer threads."""

    def __init__(self, writer_count: int) -> None:
        self._queue: queue.SimpleQueue[StagedBlock | None] = queue.SimpleQueue()
        self._writer_count = writer_count

    def put(self, staged: StagedBlock) -> None:
        """Pass a block to the writers."""
        self._queue.put(staged)

    def take(self) -> StagedBlock | None:
        """Wait for the next block and return it; None after the last one.

        The queue has one None for each writer, so a writer that got None must not call this again.
        """
        return self._queue.get()

    def end(self) -> None:
        """Record that no block follows."""
        for _ in range(self._writer_count):
            self._queue.put(None)


class Stager:
    """Stages the blocks of one attempt. Many threads may use it: of its attributes, only the queue, the arena and the failure
    change, and those are safe to use from many threads."""

    def __init__(
        self,
        plan: SavePlan,
        memory: StagingMemory,
        staged: StagedBlocks,
        failure: AttemptFailure,
        count_progress: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._memory = memory
        self._staged = staged
        self._failure = failure
        self._count_progress = count_progress

    def stage_all(self) -> None:
        """Stage every block, for a blocking save."""
        try:
            self._stage(range(len(self._plan.blocks)), with_digests=True)
        finally:
            self._staged.end()

    def stage_in_parallel(self, numbers: list[int]) -> None:
        """Stage blocks in the calling thread and up to three helper threads.

        numbers: the indexes of the blocks in the plan.
        """
        blocks = [self._plan.blocks[i] for i in numbers]
        threads = max(1, min(4, processor_count(), len(blocks) // 4))
        if blocks and is_limited_by_launches(
            self._plan.leaves[blocks[0].pieces[0].leaf], sum(b.nbytes for b in blocks), sum(len(b.pieces) for b in blocks)
        ):
            threads = 1
        shared = _SharedIterator(numbers)
        helpers = [WorkerThread(target=self._stage, args=(shared,), name="ckpt-stage", daemon=True) for _ in range(threads - 1)]
        try:
            start_available(helpers)
            self._stage(shared)
        finally:
            join_all(helpers, self._failure.report)  # they copy into the arena, which the next save may get

    def stage_deferred(self, deferred: DeferredBlocks, eager_staged: threading.Event, when_staged: Callable[[], None]) -> None:
        """Stage the deferred blocks, and report StateChanged if a leaf of them has changed since the save began.

        eager_staged: is set when all other blocks are staged.
        when_staged: is called when the state may change.
        """
        self._stage(deferred.numbers, deferred.samples, with_digests=True)
        eager_staged.wait()
        try:
            if (changed := deferred.first_changed_name()) is not None:
                self._failure.report(changed_error(changed, self._plan.step))
        except BaseException as error:  # for example, a lack of memory
            self._failure.report(error)
        finally:
            when_staged()
            self._staged.end()

    def _stage(
        self, numbers: Iterable[int], samples: Mapping[int, BlockSample] | None = None, with_digests: bool = False
    ) -> None:
        """Copy blocks into the arena and pass them to the writers.

        numbers: the indexes of the blocks in the plan.
        samples: for deferred blocks, their samples from the start of the save.
        with_digests: compute the digest of each block at once, while its bytes are in the processor cache. False if the
            training loop waits for the copy.
        """
        try:
            for i in numbers:
                if self._failure.error is not None:
                    break
                block = self._plan.blocks[i]
                region = self._memory.take(block.nbytes)
                failpoint("save.stage")
                self._copy(block, region)
                if samples is not None and (changed := first_changed_leaf(block, samples[i], region.data)) is not None:
                    raise changed_error(self._plan.name(changed), self._plan.step)
                sums = digest_and_cells(self._plan.algorithm, region.data[: block.nbytes].data) if with_digests else None
                self._count_progress()
                self._staged.put(StagedBlock(i, region, sums))
        except BaseException as error:
            self._failure.report(error)

    def _copy(self, block: Block, region: Region) -> None:
        try:
            stage_block(block, self._plan.leaves, region.data)
        except CkptError:
            raise
        except Exception as error:  # a framework may raise any type
            others = " or another one of its block" if len(block.pieces) > 1 else ""
            raise StagingFailed(
                f"leaf {self._plan.name(block.pieces[0].leaf)}{others} could not be copied for step {self._plan.step} "
                f"({type(error).__name__}: {first_line(error)}): give a smaller memory=, save with blocking=True, or leave "
                "the leaf out"
            ) from error


class _SharedIterator:
    """One iteration shared by several threads."""

    def __init__(self, items: Iterable[int]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()
        """Guards `_items`."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._items)
