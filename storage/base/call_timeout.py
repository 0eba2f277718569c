"""Calls to a file system that may never come back: a hung NFS or FUSE mount puts its caller into uninterruptible sleep.

A thread in such a call can't be interrupted. So the main thread, which must take Ctrl-C and must not wait without end, lets
another thread make these calls.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.base.file_system_kind import is_on_local_file_system

T = TypeVar("T")
P = ParamSpec("P")

STORE_TIMEOUT_VARIABLE = "CKPT_STORE_TIMEOUT"
"""Seconds after which a call that does not come back, or a save that makes no progress, is an error."""

DEFAULT_TIMEOUT_SECONDS = 600.0


def store_timeout_seconds() -> float:
    """The value of CKPT_STORE_TIMEOUT; raise InvalidArgument where it is no positive number."""
    text = os.environ.get(STORE_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT_SECONDS
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InvalidArgument(f"{STORE_TIMEOUT_VARIABLE}={text!r}: give a positive number of seconds")
    return seconds


class StallTimer:
    """For how many seconds a piece of work has made no progress. They are counted, not read from a clock: a process that was
    stopped for an hour has not waited for an hour."""

    def __init__(self, progress: int = 0) -> None:
        """moves: a number that grows as long as there is progress."""
        self.seconds = 0.0
        self._progress = progress

    def next_wait_seconds(self) -> float:
        """How many seconds to wait before `is_too_long` is asked."""
        return min(1.0, max(0.0, store_timeout_seconds() - self.seconds))

    def has_timed_out(self, waited_seconds: float, progress: int) -> bool:
        """Count seconds that were waited in vain; whether there was no progress for CKPT_STORE_TIMEOUT seconds."""
        if progress != self._progress:
            self._progress, self.seconds = progress, 0.0
            return False
        self.seconds += waited_seconds
        return self.seconds >= store_timeout_seconds()


def call_in_thread(call: Callable[[], T], what: str) -> T:
    """Let a thread of its own make a call, and wait for it at most `patience_seconds`. Raises Unavailable after that.

    The thread of a call that does not come back stays. The end of the process does not wait for it.
    """
    seconds, future = store_timeout_seconds(), Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ckpt-call", daemon=True).start()
    try:
        return future.result(seconds)
    except Late:
        if future.done():
            raise
        raise Unavailable(
            f"{what}: no answer for {seconds:g} s. A mount hangs, or its server is down; bring it back or unmount it, "
            f"and start again ({STORE_TIMEOUT_VARIABLE} sets the seconds)"
        ) from None


class StoreFolder:
    """A folder of the file system, on a local disk or not."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._is_local: bool | None = None

    def is_local(self) -> bool:
        """Whether the folder is on a local disk, whose calls come back. A folder that does not exist yet is asked again."""
        if self._is_local is None:
            exists, found = call_in_thread(lambda: (os.path.isdir(self.root), is_on_local_file_system(self.root)), self.root)
            if not exists:
                return found
            self._is_local = found
        return self._is_local


@functools.lru_cache(1024)
def folder_at(root: str) -> StoreFolder:
    """The folder at a path, remembered by its path."""
    return StoreFolder(root)


def can_block_on(root: str) -> bool:
    """Whether this thread may make calls to a folder: the main thread only where it is on a local disk."""
    return threading.current_thread() is not threading.main_thread() or folder_at(root).is_local()


def interruptible(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """For a method of a store with a `root`: another thread makes the call where this one may not wait for it."""

    @functools.wraps(method)
    def made(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if can_block_on(self.root):
            return method(self, *args, **kwargs)
        return call_in_thread(functools.partial(method, self, *args, **kwargs), f"{method.__name__} at {self.root}")

    return cast(Callable[Concatenate[Any, P], T], made)
