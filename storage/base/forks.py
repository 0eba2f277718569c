"""What a forked child does with the state of its parent, whose threads do not exist in the child."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ckpt.storage.base.errors import StoreError

_PAUSE_SECONDS = 0.001
"""Seconds between two checks of a fork, and of a call that waits for its end."""


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


class ForkGate:
    """Lets no `os.fork` of this process run during certain calls, whose locks would stay locked in the child.

    seconds: how long a fork waits for the calls that are running. After that it runs all the same.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        # Used without a lock, as each call of a set is atomic: a fork would wait for that lock, too.
        self._calls: set[object] = set()
        self._forking_threads: set[int] = set()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._begin_in_child)

    @contextmanager
    def no_fork(self) -> Iterator[None]:
        """Wait until no thread forks, and let none fork during the block. The block must not fork."""
        call = object()
        try:
            self._calls.add(call)  # first, so that a fork that begins now waits
            while self._forking_threads:
                self._calls.discard(call)
                time.sleep(_PAUSE_SECONDS)
                self._calls.add(call)
            yield
        finally:
            self._calls.discard(call)

    def _close(self) -> None:
        self._forking_threads.add(threading.get_ident())
        until = time.monotonic() + self._seconds
        while self._calls and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)

    def _open(self) -> None:
        self._forking_threads.discard(threading.get_ident())

    def _begin_in_child(self) -> None:
        self._calls.clear()
        self._forking_threads.clear()


_libraries: list[ThreadedLibrary] = []


class ThreadedLibrary:
    """A native library with threads of its own. In a forked child they do not exist, so that its calls never return there.

    name: of the library, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._user: int | None = None
        _libraries.append(self)

    @property
    def is_used(self) -> bool:
        """Whether this process, or one from which it was forked, uses the library."""
        return self._user is not None

    def note_use(self) -> None:
        """Note that this process uses the library."""
        if self._user is None:
            self._user = os.getpid()

    def require_usable(self, url: str) -> None:
        """Note that this process uses the library. Raises StoreError if it was forked from a process that has used it.

        url: what is read or written, for the message.
        """
        self.note_use()
        process = os.getpid()
        if self._user != process:
            raise StoreError(
                f"{url} can't be used in process {process}: it was forked from process {self._user}, which has used "
                f"{self._name} before; start it by spawn or forkserver (DataLoader: multiprocessing_context=)"
            )


def _free_in_forked_child(lock: object) -> None:
    # The locks of the standard library are freed in the same way.
    if (free := getattr(lock, "_at_fork_reinit", None)) is not None:
        call_in_forked_child(free)


def _keep_objects_of_libraries() -> None:
    """Let no garbage collection in a child free objects of its parent: one of such a library would abort or hang the child."""
    if any(library.is_used for library in _libraries):
        gc.freeze()


call_in_forked_child(_keep_objects_of_libraries)
