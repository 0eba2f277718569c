"""The memory that a save stages in: how much of it, and the arena of one attempt."""

from __future__ import annotations

import threading
from typing import Any

from ckpt.block_io import staging_arena as arenas
from ckpt.block_io.staging_arena import Arena, Region, available_memory, round_up
from ckpt.errors import MORE_MEMORY_ADVICE, StagingFailed
from ckpt.format.limits import BLOCK_BYTES
from ckpt.groups.base import Group
from ckpt.saving.options import Options
from ckpt.saving.save_plan import SavePlan, planned_bytes
from ckpt.storage.base.errors import first_line

_MIN_ARENA_BYTES = 32 << 20
"""That of a small state, a quarter of it at most: memory touched for the first time costs more than the disk."""


def blocking_arena_bytes(total: int, writer_count: int, memory: int | None) -> int:
    """The arena of a save of `total` bytes whose caller waits."""
    # Half as many are staged as are written: what is small stays in the caches.
    most = writer_count * BLOCK_BYTES * 3 // 2
    return min(total, max(_MIN_ARENA_BYTES, min(most, total // 4)), memory or most)


def background_arena_bytes(total: int, memory: int | None) -> int:
    """The arena of a save of `total` bytes in the background."""
    return min(total, memory or int(available_memory() * 0.8))


def staging_bytes(state: Any, options: Options, group: Group) -> int:
    """The size of the arena that an asynchronous save of `state` will take."""
    return background_arena_bytes(planned_bytes(state, options, group), options.memory)


class StagingMemory:
    """The arena of one attempt. The caller borrows it before any other thread uses it, and the last thread gives it back."""

    def __init__(self) -> None:
        self.writing_allowed = threading.Event()
        """Set when the writers may begin: all is staged that is not deferred, the arena is full, or the save has failed."""
        self._arena: Arena | None = None

    def borrow(self, nbytes: int, plan: SavePlan, where: str) -> None:
        """Get an arena of at least `nbytes`, if anything is to be staged; raise StagingFailed. where: for its message."""
        largest = max((round_up(b.nbytes) for b in plan.blocks), default=0)
        if not nbytes and not largest:
            return
        # Twice the largest block: a ring that a block nearly fills could otherwise never turn.
        arena_bytes = max(nbytes, min(2 * largest, 2 * BLOCK_BYTES))
        try:
            self._arena = arenas.pool.borrow(arena_bytes)
        except (MemoryError, OSError) as error:
            raise StagingFailed(
                f"{where}: no {arena_bytes >> 20} MiB for staging ({first_line(error)}): {MORE_MEMORY_ADVICE}"
            ) from error
        if any(leaf.flat is None and leaf.is_on_cuda() for leaf in plan.flat.leaves.values()):
            self._arena.pin()

    def is_less_than(self, nbytes: int) -> bool:
        """Whether so much can't be staged at once."""
        return self._arena is not None and nbytes > self._arena.capacity_bytes

    def take(self, nbytes: int) -> Region:
        """A region for a block; waits for the writers where there is no room. Raises ArenaAbandoned after `abandon`."""
        assert self._arena is not None
        region = self._arena.take(nbytes, wait=False)
        if region is None:
            self.writing_allowed.set()  # full: only the writers can make room
            region = self._arena.take(nbytes)
            assert region is not None
        return region

    def give_back(self, region: Region) -> None:
        """For a writer: the region of a block is free again."""
        assert self._arena is not None
        self._arena.give_back(region)

    def abandon(self) -> None:
        """The save has failed: nobody waits for room or for permission any more."""
        if self._arena is not None:
            self._arena.abandon()
        self.writing_allowed.set()

    def close(self) -> None:
        """No thread uses the arena any more."""
        if self._arena is not None:
            arenas.pool.give_back(self._arena)
