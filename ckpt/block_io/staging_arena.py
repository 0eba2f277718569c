"""Staging memory for saves, mapped once and reused: mapping new pages takes longer than writing them to a disk.

An arena is a ring. Regions are taken in order and given back in any order. If the ring is full, `take` waits: this is the
back-pressure on a state that is larger than the memory budget.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.forks import call_in_forked_child
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.base.store import ALIGNMENT
from ckpt.storage.base.threads import WorkerThread, try_start

if TYPE_CHECKING:
    import torch


class ArenaAbandoned(Exception):
    """`take` was interrupted because another thread of the save failed."""


class Region:
    """A part of an arena: a multiple of ALIGNMENT bytes that starts on a page."""

    __slots__ = ("data", "end", "free")

    def __init__(self, data: Bytes, end: int) -> None:
        self.data = data
        self.end = end  # end position of the region in the ring, counted without wrapping
        self.free = False


class Arena:
    """A ring of `capacity_bytes` bytes of page-aligned memory. Several threads may take and give back regions."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = round_up(capacity_bytes)
        self._map = map_huge_pages(self.capacity_bytes)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        self._pinned_for: torch.device | None = None
        """The CUDA device for which the memory is page-locked."""
        self._regions: deque[Region] = deque()
        self._head = 0
        self._tail = 0
        self._changed = threading.Condition()
        """Guards `_regions`, `_head`, `_tail` and `_abandoned`. Notified when a region becomes free, and by `abandon`."""
        self._abandoned = False

    def take(self, nbytes: int, wait: bool = True) -> Region | None:
        """Return a region of at least `nbytes` bytes. Without room, wait for it, or return None if `wait` is false.

        Raises ArenaAbandoned after `abandon`, and ValueError if the arena has fewer than `nbytes` bytes.
        """
        length = round_up(nbytes)
        if length > self.capacity_bytes:
            raise ValueError(f"a region of {length} bytes does not fit an arena of {self.capacity_bytes}")
        with self._changed:
            while True:
                if self._abandoned:
                    raise ArenaAbandoned
                start = self._head
                if start % self.capacity_bytes + length > self.capacity_bytes:  # would wrap: skip the rest of the ring
                    start += self.capacity_bytes - start % self.capacity_bytes
                if start + length - self._tail <= self.capacity_bytes:
                    break
                if not self._regions:  # the ring is empty, but the head is too close to its end: restart from its start
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
        """Raise ArenaAbandoned in every thread that waits in `take` or calls it, until `reset`."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Make the whole arena free. Call it only when no region is in use."""
        with self._changed:
            self._regions.clear()
            self._head = self._tail = 0
            self._abandoned = False

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory for copies from a CUDA device, if it is not locked yet."""
        if self._pinned_for is None:
            from ckpt.state.leaves import torch_streams

            self._pinned_for = device if torch_streams.pin(self.memory, device) else None

    def close(self) -> None:
        """Unmap the memory. Views of it that still exist keep it mapped until they are deleted."""
        if self._pinned_for is not None:
            from ckpt.state.leaves import torch_streams

            torch_streams.unpin(self.memory, self._pinned_for)
        del self.memory
        try:
            self._map.close()
        except BufferError:
            pass


def round_up(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of ALIGNMENT, at least ALIGNMENT."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


_TOUCH_BYTES = 64 << 20
"""Bytes that `ArenaPool.prepare` touches before it checks again whether the program has ended."""


class ArenaPool:
    """Idle arenas for the next saves; a returned arena replaces all idle ones that are not larger."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_idle` and `_preparing`."""
        self._idle: list[Arena] = []
        self._preparing: threading.Thread | None = None
        """The thread of the last `prepare`."""
        call_in_forked_child(self.__init__)  # type: ignore[misc]

    def borrow(self, capacity_bytes: int) -> Arena:
        """Return an idle arena of at least `capacity_bytes` bytes, or a new one. Wait for the end of a `prepare`."""
        with self._lock:
            preparing = self._preparing
        if preparing is not None:
            preparing.join()  # otherwise the same memory would be mapped twice
        return self._take(capacity_bytes)

    def _take(self, capacity_bytes: int) -> Arena:
        with self._lock:
            fitting = [a for a in self._idle if round_up(capacity_bytes) <= a.capacity_bytes]
            arena = min(fitting, key=lambda a: a.capacity_bytes, default=None)
            if arena is not None:
                self._idle.remove(arena)
                return arena
        return Arena(capacity_bytes)

    def give_back(self, arena: Arena) -> None:
        """Keep the arena for the next save, and close smaller idle ones, which it can replace."""
        arena.reset()
        with self._lock:
            smaller = [a for a in self._idle if a.capacity_bytes <= arena.capacity_bytes]
            self._idle = [a for a in self._idle if a.capacity_bytes > arena.capacity_bytes] + [arena]
        for old in smaller:
            old.close()

    def prepare(self, capacity_bytes: int, cuda_device: torch.device | None = None) -> None:
        """Map and touch an arena of `capacity_bytes` bytes in a background thread, so that the next save need not do it.

        The first touch of a page costs ten times as much as the copy into it (measured: 1.5 s for 2 GiB, then 0.13 s).

        cuda_device: page-lock the memory for copies from this device.
        """
        with self._lock:
            if self._preparing is None or not self._preparing.is_alive():
                thread = WorkerThread(target=self._prepare, args=(capacity_bytes, cuda_device), name="ckpt-prepare")
                if try_start(thread):
                    self._preparing = thread  # set after the start, since another thread may join it

    def _prepare(self, capacity_bytes: int, cuda_device: torch.device | None) -> None:
        try:
            arena = self._take(capacity_bytes)
        except (OSError, ValueError):
            return  # not enough memory: the save itself raises the error if it needs that much
        for start in range(0, arena.capacity_bytes, _TOUCH_BYTES):
            if not threading.main_thread().is_alive():
                break
            arena.memory[start : start + _TOUCH_BYTES : ALIGNMENT] = 0
        else:
            if cuda_device is not None:
                arena.pin(cuda_device)
        self.give_back(arena)

    def clear(self) -> None:
        """Return all idle memory to the system."""
        with self._lock:
            idle, self._idle = self._idle, []
        for arena in idle:
            arena.close()


pool = ArenaPool()
