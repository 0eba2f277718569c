"""How many threads of this process copy bytes of blocks at the same time."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from ckpt.storage.base.forks import call_in_forked_child
from ckpt.support.runtime import processor_count


class _CopySlots:
    """Limits how many threads copy at the same time, by a semaphore. A forked child starts with all slots free."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._semaphore = threading.BoundedSemaphore(count)
        call_in_forked_child(self._release_all)

    def _release_all(self) -> None:
        """In a forked child: the threads that are in a slot do not exist."""
        self._semaphore = threading.BoundedSemaphore(self._count)

    def slot(self) -> AbstractContextManager[object]:
        """Return a context that waits until a slot is free."""
        return self._semaphore


copy_slots = _CopySlots(processor_count())
"""For copies from the page cache, one for each processor. More threads evict each other's chunks from the caches of the
processor, between the copy of a chunk and its digest."""

small_copy_slots = _CopySlots(1)
"""For copies of small pieces. Python code takes most of their time, and threads that compete for the lock of the interpreter
are slower than one."""
