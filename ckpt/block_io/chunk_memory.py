"""Memory for chunks that are read past the page cache: slices of memory on huge pages, which the threads of a process share.

If each thread had huge pages of its own, they would cost more time to clear than its first reads take.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

from ckpt.block_io.staging_arena import round_up
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.forks import call_in_forked_child
from ckpt.storage.base.huge_pages import map_huge_pages

_MAPPED_BYTES = 8 << 20
"""The least bytes of one mapping. It is unmapped when all of its slices are garbage."""


class _ChunkMemory:
    """Gives out slices of the newest mapping to all threads, and maps more memory when it is used up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_mapping`, from which the next slice is taken, and `_used_bytes`."""
        self._mapping: weakref.ref[np.ndarray] | None = None
        self._used_bytes = 0

    def take(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` bytes in whole pages. They are free again when the array is garbage."""
        nbytes = round_up(nbytes)
        with self._lock:
            mapping = self._mapping() if self._mapping is not None else None
            if mapping is None or self._used_bytes + nbytes > len(mapping):
                mapping = np.frombuffer(map_huge_pages(max(nbytes, _MAPPED_BYTES)), np.uint8)
                self._mapping, self._used_bytes = weakref.ref(mapping), 0
            begin = self._used_bytes
            self._used_bytes += nbytes
            return mapping[begin : begin + nbytes]


chunk_memory = _ChunkMemory()

call_in_forked_child(chunk_memory.__init__)  # type: ignore[misc]
