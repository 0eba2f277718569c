"""The class StagingMemory, the staging arena of one save attempt, and the functions that choose its size."""

from __future__ import annotations

import threading
from typing import Any

from ckpt.block_io import staging_arena
from ckpt.block_io.staging_arena import Arena, Region, round_up
from ckpt.errors import MORE_MEMORY_ADVICE, StagingFailed
from ckpt.format.limits import BLOCK_BYTES
from ckpt.groups.base import Group
from ckpt.saving.options import Options
from ckpt.saving.save_plan import SavePlan, cuda_device_of, flatten_state, planned_bytes
from ckpt.storage.base.errors import first_line
from ckpt.support.available_memory import available_memory

_MIN_ARENA_BYTES = 32 << 20
"""The smallest arena of a blocking save, unless the state or `memory` is smaller. Above it, the arena has at most a quarter of
the state's size, because the first use of new memory costs more time than the disk."""


def blocking_arena_bytes(total: int, writer_count: int, memory: int | None) -> int:
    """Return the arena size of a blocking save of `total` bytes. memory: the limit that the user set, or None."""
    # Room for one block in each writer and half as many staged ones: a small arena stays in the processor caches.
    most = writer_count * BLOCK_BYTES * 3 // 2
    return min(total, max(_MIN_ARENA_BYTES, min(most, total // 4)), memory or most)


def background_arena_bytes(total: int, memory: int | None) -> int:
    """Return the arena size of a background save of `total` bytes. memory: the limit that the user set, or None."""
    return min(total, memory or int(available_memory() * 0.8))


def prepare_staging(state: Any, options: Options, group: Group) -> None:
    """Map the arena of an asynchronous save of `state` in a background thread, page-locked where leaves are on CUDA."""
    flat = flatten_state(state, group)
    nbytes = background_arena_bytes(planned_bytes(flat, options, group), options.memory)
    if nbytes:
        staging_arena.pool.prepare(nbytes, cuda_device_of(flat))


class StagingMemory:
    """The arena of one attempt.

    The caller borrows it before other threads use it, and the last thread returns it with `close`.
    """

    def __init__(self) -> None:
        self.writing_allowed = threading.Event()
        """Set when the writers may begin: at once if the caller waits for the commit or the arena is smaller than the state,
        otherwise when all blocks but deferred ones are staged, the arena is full, or the save failed."""
        self._arena: Arena | None = None

    def borrow(self, nbytes: int, plan: SavePlan, where: str) -> None:
        """Borrow an arena of at least `nbytes` if the plan has blocks; raise StagingFailed if there is not enough memory.

        where: the step and the repository, for the message.
        """
        largest = max((round_up(b.nbytes) for b in plan.blocks), default=0)
        if not nbytes and not largest:
            return
        # At least twice the largest block: in a smaller ring, a block may never find enough contiguous space.
        arena_bytes = max(nbytes, min(2 * largest, 2 * BLOCK_BYTES))
        try:
            self._arena = staging_arena.pool.borrow(arena_bytes)
        except (MemoryError, OSError) as error:
            raise StagingFailed(
                f"{where}: no {arena_bytes >> 20} MiB for staging ({first_line(error)}): {MORE_MEMORY_ADVICE}"
            ) from error
        if (device := cuda_device_of(plan.flat)) is not None:
            self._arena.pin(device)

    def is_less_than(self, nbytes: int) -> bool:
        """Return whether the arena is too small to stage `nbytes` at once."""
        return self._arena is not None and nbytes > self._arena.capacity_bytes

    def take(self, nbytes: int) -> Region:
        """Return a region for a block. If the arena is full, wait for the writers. Raises ArenaAbandoned after `abandon`."""
        assert self._arena is not None
        region = self._arena.take(nbytes, wait=False)
        if region is None:
            self.writing_allowed.set()  # the arena is full, and only the writers free regions
            region = self._arena.take(nbytes)
            assert region is not None
        return region

    def give_back(self, region: Region) -> None:
        """Return the region of a written block to the arena."""
        assert self._arena is not None
        self._arena.give_back(region)

    def abandon(self) -> None:
        """After a failure: wake all threads that wait for a region or for `writing_allowed`."""
        if self._arena is not None:
            self._arena.abandon()
        self.writing_allowed.set()

    def close(self) -> None:
        """Return the arena to the pool, when no thread uses it any more."""
        arena, self._arena = self._arena, None
        if arena is not None:
            staging_arena.pool.give_back(arena)
