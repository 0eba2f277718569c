"""How many threads of a save may compute at once."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

from ckpt.support.runtime import processor_count


class ComputeSlots:
    """Once the caller trains on, one processor is its: two writers that hash at once would take turns with it.

    caller_goes_on: set from then on.
    """

    def __init__(self, caller_goes_on: threading.Event) -> None:
        self._caller_goes_on = caller_goes_on
        self._processors = threading.Semaphore(max(1, processor_count() - 1))

    def slot(self) -> AbstractContextManager[object]:
        """In it a writer hashes or encodes."""
        return self._processors if self._caller_goes_on.is_set() else nullcontext()
