"""Staging memory: mapped once, reused for ever. A new mapping of pages costs more than the disk it feeds.

An arena is a ring. Regions are taken in order and given back in any order; where the ring is full, taking waits, and
that is the back-pressure on a state larger than the memory budget.
"""

from __future__ import annotations

import os
import threading
from collections import deque

import numpy as np

from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import ALIGNMENT


class ArenaAbandoned(Exception):
    """Taking was given up because the save failed elsewhere."""


class Region:
    """A part of an arena, a multiple of ALIGNMENT bytes, starting on a page."""

    __slots__ = ("data", "end", "free")

    def __init__(self, data: Bytes, end: int) -> None:
        self.data = data
        self.end = end  # of the region in the ring, counted without wrapping
        self.free = False


class Arena:
    """A ring of `capacity` bytes of page-aligned memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = round_up(capacity_bytes)
        self._map = map_huge_pages(self.capacity_bytes)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        self.pinned = False
        self._regions: deque[Region] = deque()
        self._head = 0
        self._tail = 0
        self._changed = threading.Condition()
        self._abandoned = False

    def take(self, nbytes: int, wait: bool = True) -> Region | None:
        """Return a region of at least `nbytes`; where there is no room, wait for it, or return None if not `wait`."""
        length = round_up(nbytes)
        if length > self.capacity_bytes:
            raise ValueError(f"a region of {length} bytes does not fit an arena of {self.capacity_bytes}")
        with self._changed:
            while True:
                if self._abandoned:
                    raise ArenaAbandoned
                start = self._head
                if start % self.capacity_bytes + length > self.capacity_bytes:  # would wrap: leave out the rest of the ring
                    start += self.capacity_bytes - start % self.capacity_bytes
                if start + length - self._tail <= self.capacity_bytes:
                    break
                if not self._regions:  # empty, but the head stands badly: begin anew
                    self._head = self._tail = 0
                    continue
                if not wait:
                    return None
                self._changed.wait()
            self._head = start + length
            at = start % self.capacity_bytes
            region = Region(self.memory[at : at + length], self._head)
            self._regions.append(region)
            return region

    def give_back(self, region: Region) -> None:
        """Make the region free for reuse."""
        with self._changed:
            region.free = True
            while self._regions and self._regions[0].free:
                self._tail = self._regions.popleft().end
            self._changed.notify_all()

    def abandon(self) -> None:
        """Wake every thread that waits in `take` with ArenaClosed, until `reset`."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Make all of it free. Only when no region is in use."""
        with self._changed:
            self._regions.clear()
            self._head = self._tail = 0
            self._abandoned = False

    def pin(self) -> None:
        """Page-lock the memory for CUDA, once."""
        if not self.pinned:
            from ckpt.state.leaves import torch as torch_leaves

            self.pinned = torch_leaves.pin(self.memory)

    def close(self) -> None:
        """Unmap. Views of the memory that are still about keep it alive until they go."""
        if self.pinned:
            from ckpt.state.leaves import torch as torch_leaves

            torch_leaves.unpin(self.memory)
        del self.memory
        try:
            self._map.close()
        except BufferError:
            pass


def round_up(nbytes: int) -> int:
    """The next multiple of ALIGNMENT, at least one."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


_TOUCH_BYTES = 64 << 20


class ArenaPool:
    """Arenas at rest, kept for the next save. One of each size class that is in use, no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Arena] = []
        self._preparing: threading.Thread | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.__init__)  # type: ignore[misc]

    def borrow(self, capacity_bytes: int) -> Arena:
        """Return an idle arena of at least `capacity` bytes, or a new one."""
        preparing = self._preparing
        if preparing is not None and preparing is not threading.current_thread():
            preparing.join()  # rather than map the same memory twice
        with self._lock:
            fitting = [a for a in self._idle if round_up(capacity_bytes) <= a.capacity_bytes]
            arena = min(fitting, key=lambda a: a.capacity_bytes, default=None)
            if arena is not None:
                self._idle.remove(arena)
                return arena
        return Arena(capacity_bytes)

    def give_back(self, arena: Arena) -> None:
        """Keep the arena for the next save; a smaller idle one goes, since this one serves its purpose."""
        arena.reset()
        with self._lock:
            smaller = [a for a in self._idle if a.capacity_bytes <= arena.capacity_bytes]
            self._idle = [a for a in self._idle if a.capacity_bytes > arena.capacity_bytes] + [arena]
        for old in smaller:
            old.close()

    def prepare(self, capacity_bytes: int) -> None:
        """Have an arena of `capacity` bytes mapped and touched in the background, so that the next save need not.

        The first touch of a page costs ten times as much as the copy into it (measured: 1.5 s for 2 GiB, then 0.13 s).
        """
        if self._preparing is None or not self._preparing.is_alive():
            thread = threading.Thread(target=self._prepare, args=(capacity_bytes,), name="ckpt-prepare")
            thread.start()
            self._preparing = thread  # begun, so that another thread can wait for it

    def _prepare(self, capacity_bytes: int) -> None:
        try:
            arena = self.borrow(capacity_bytes)
        except (OSError, ValueError):
            return  # not so much memory: the save will say so, if it wants as much
        for start in range(0, arena.capacity_bytes, _TOUCH_BYTES):
            if not threading.main_thread().is_alive():
                break
            arena.memory[start : start + _TOUCH_BYTES : ALIGNMENT] = 0
        self.give_back(arena)

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            arena.close()


pool = ArenaPool()


def available_memory() -> int:
    """Bytes that can be taken without swapping; where the system does not say, 8 GiB."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 8 << 30
