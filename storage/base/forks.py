"""What a forked child does with the state of its parent: it frees the locks of threads that do not exist in the child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


def call_in_forked_child(call: Callable[[], object]) -> None:
    """Call a function in each child that this process forks, before `os.fork` returns there. It must not wait for a lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def fork_safe_lock() -> AbstractContextManager[bool]:
    """Return a lock for the variables of a module. It is free in a forked child."""
    lock = threading.Lock()
    _free_in_forked_child(lock)
    return lock


def fork_safe_rlock() -> AbstractContextManager[bool]:
    """Return a reentrant lock for the variables of a module. It is free in a forked child."""
    lock = threading.RLock()
    _free_in_forked_child(lock)
    return lock


def _free_in_forked_child(lock: object) -> None:
    # The locks of the standard library are freed in the same way.
    if (free := getattr(lock, "_at_fork_reinit", None)) is not None:
        call_in_forked_child(free)
