"""A pool of scratch memory for fragments, mapped once, reused, and aligned for O_DIRECT."""

from __future__ import annotations

import threading

import numpy as np

from ckpt.storage.base.huge_pages import map_huge_pages

_MAX_BYTES = 128 << 20
_MIN_BYTES = 256 << 10  # smaller memory is allocated for each use


class ScratchPool:
    """Unused scratch memory, by length. Safe to use from many threads."""

    def __init__(self) -> None:
        self._unused: list[np.ndarray] = []
        self._lock = threading.Lock()
        """Guards `_unused`."""

    def take(self, nbytes: int) -> np.ndarray:
        """Return memory of this length in bytes, with any content."""
        if nbytes < _MIN_BYTES:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            for i, found in enumerate(self._unused):
                if len(found) == nbytes:
                    return self._unused.pop(i)
        return np.frombuffer(map_huge_pages(nbytes), np.uint8)

    def give_back(self, memory: np.ndarray) -> None:
        """Return memory to the pool. No thread may use it any more."""
        if len(memory) < _MIN_BYTES:
            return
        with self._lock:
            self._unused.append(memory)
            while sum(map(len, self._unused)) > _MAX_BYTES:
                del self._unused[0]
