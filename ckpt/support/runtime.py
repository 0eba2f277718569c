"""Control of the Python runtime during saves and loads: collector, stack, processors, priority of threads.

The garbage collector is paused while many small objects are created that all stay alive, since it would visit them repeatedly:
with 20,000 leaves that took a third of the time of a load. Background threads give precedence to the training threads.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.forks import call_in_forked_child, fork_safe_lock

_NEEDED_FRAMES = 150
"""The stack frames that a load needs. A shallow state takes about 60, with the first imports of pyarrow and of a store."""

_lock = fork_safe_lock()
"""Guards `_pause_count` and `_was_enabled`."""
_pause_count = 0
_was_enabled = False


def _end_pauses() -> None:
    """In a forked child: end all pauses, because their threads do not exist."""
    global _pause_count
    if _pause_count and _was_enabled:
        gc.enable()
    _pause_count = 0


call_in_forked_child(_end_pauses)


def require_stack() -> None:
    """Raise CkptError if the stack has too few frames left for a load: its RecursionErrors would look like damage."""
    used, frame = 0, sys._getframe()
    while (caller := frame.f_back) is not None:
        used, frame = used + 1, caller
    if used + _NEEDED_FRAMES > sys.getrecursionlimit():
        raise CkptError(
            f"a load needs {_NEEDED_FRAMES} stack frames, and {used} of {sys.getrecursionlimit()} are in use; raise the "
            "limit with sys.setrecursionlimit"
        )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Prevent garbage collection in all threads while the context is open; contexts may overlap."""
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
            _pause_count = max(0, _pause_count - 1)  # 0 already if this process was forked in the context
            if not _pause_count and _was_enabled:
                gc.enable()


def processor_count() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lower_thread_priority() -> None:
    """Lower the priority of the current thread, so that the training step gets the processor first.

    On Linux each thread has a priority of its own, and the threads that it starts inherit it. Elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
