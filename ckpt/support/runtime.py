"""Keeping a save from being felt.

The garbage collector pauses while many small objects are made that all stay: it would look at them over and over. Measured
with 20,000 leaves: a third of the time of a load. Background threads let those of training go first, and compute on all
processors but one.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_lock = threading.Lock()
_pause_count = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection while the context is open, in any thread; contexts may overlap."""
    global _pause_count, _was_enabled
    with _lock:
        if not _pause_count:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pause_count += 1
    try:
        yield
    finally:
        with _lock:
            _pause_count -= 1
            if not _pause_count and _was_enabled:
                gc.enable()


def processor_count() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lower_thread_priority() -> None:
    """Let the training step have the processor first: on Linux a thread has a priority of its own, inherited by its
    children."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
