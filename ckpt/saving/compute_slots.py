"""The class ComputeSlots, which limits how many threads of a save compute at the same time."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

from ckpt.support.runtime import processor_count


class ComputeSlots:
    """Leaves one processor to the training loop while it runs, so that it does not share one with the writer threads.

    caller_continues: is set when the caller of the save trains again; before that there is no limit.
    """

    def __init__(self, caller_continues: threading.Event) -> None:
        self._caller_continues = caller_continues
        self._processors = threading.Semaphore(max(1, processor_count() - 1))

    def slot(self) -> AbstractContextManager[object]:
        """Return a context in which a writer hashes or encodes; entering it waits for a free processor."""
        return self._processors if self._caller_continues.is_set() else nullcontext()
