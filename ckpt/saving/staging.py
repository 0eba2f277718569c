"""The first stage of a save: blocks are copied from the state into an arena, and handed on to the writers.

A blocking save stages with one thread beside the writers. An asynchronous one stages with the caller and helpers of it before
anything is written, but for what is deferred. Where the arena is full, staging waits for the writers to give regions back.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt.block_io.staging_arena import Region
from ckpt.errors import MORE_MEMORY_ADVICE, StagingFailed
from ckpt.format.digest import digest_and_cells
from ckpt.saving.attempt_failure import AttemptFailure
from ckpt.saving.change_detection import BlockSample, first_changed_leaf
from ckpt.saving.deferred_blocks import DeferredBlocks, changed_error
from ckpt.saving.save_plan import SavePlan
from ckpt.saving.staging_memory import StagingMemory
from ckpt.saving.write_plan import Block, stage_block
from ckpt.storage.base.errors import CkptError, first_line
from ckpt.storage.base.failpoints import failpoint
from ckpt.support.runtime import processor_count


class StagedBlock(NamedTuple):
    """A block in the arena, with its digest and cells if they are known already."""

    number: int
    """In the plan."""
    region: Region
    sums: tuple[bytes, bytes] | None


class StagedBlocks:
    """The queue from the threads that stage to those that write."""

    def __init__(self, writer_count: int) -> None:
        self._queue: queue.SimpleQueue[StagedBlock | None] = queue.SimpleQueue()
        self._writer_count = writer_count

    def put(self, staged: StagedBlock) -> None:
        """Hand a block on."""
        self._queue.put(staged)

    def take(self) -> StagedBlock | None:
        """The next block, None after the last one: one None for each writer, which takes nothing more then."""
        return self._queue.get()

    def end(self) -> None:
        """No block follows."""
        for _ in range(self._writer_count):
            self._queue.put(None)


class Stager:
    """Of one attempt, used by all of its threads that stage: nothing here changes but the queue and the arena."""

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
        """Stage every block, for a save whose caller waits."""
        try:
            self._stage(range(len(self._plan.blocks)), with_digests=True)
        finally:
            self._staged.end()

    def stage_in_parallel(self, numbers: list[int]) -> None:
        """Stage with as many threads as copy faster than one, the caller among them."""
        threads = max(1, min(4, processor_count(), len(numbers) // 4))
        shared = _SharedIterator(numbers)
        helpers = [
            threading.Thread(target=self._stage, args=(shared,), name="ckpt-stage", daemon=True) for _ in range(threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._stage(shared)
        for helper in helpers:
            helper.join()

    def stage_deferred(self, deferred: DeferredBlocks, eager_staged: threading.Event, when_staged: Callable[[], None]) -> None:
        """Stage what may be read later, and prove that it was not changed meanwhile.

        eager_staged: set when all other blocks are staged. when_staged: called when the state may be changed.
        """
        self._stage(deferred.numbers, deferred.samples, with_digests=True)
        eager_staged.wait()
        if (changed := deferred.first_changed_name()) is not None:
            self._failure.report(changed_error(changed, self._plan.step))
        when_staged()
        self._staged.end()

    def _stage(
        self, numbers: Iterable[int], samples: Mapping[int, BlockSample] | None = None, with_digests: bool = False
    ) -> None:
        """Copy blocks into the arena and pass them on.

        samples: what blocks that are staged late were before. with_digests: digest each at once, while it is still in the
        cache. Not where the training loop waits for the copy.
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
        except Exception as error:  # frameworks raise what they like
            others = " or another one of its block" if len(block.pieces) > 1 else ""
            raise StagingFailed(
                f"leaf {self._plan.name(block.pieces[0].leaf)}{others} could not be copied for step {self._plan.step} "
                f"({type(error).__name__}: {first_line(error)}): {MORE_MEMORY_ADVICE}"
            ) from error


class _SharedIterator:
    """One iteration shared by several threads."""

    def __init__(self, items: Iterable[int]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._items)
