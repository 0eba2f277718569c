"""How many threads of this process copy from the page cache at the same time: one for each processor.

More threads evict each other's chunks from the processor's caches, between the copy of a chunk and its digest.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from ckpt.support.runtime import processor_count


class _CopySlots:
    def __init__(self) -> None:
        self._semaphore = threading.BoundedSemaphore(processor_count())

    def slot(self) -> AbstractContextManager[object]:
        """Return a context that waits until fewer than `processor_count()` threads are in it."""
        return self._semaphore


copy_slots = _CopySlots()

if hasattr(os, "register_at_fork"):  # the threads that are in a slot do not exist in the child
    os.register_at_fork(after_in_child=copy_slots.__init__)  # type: ignore[misc]
