"""Timeouts for file system calls that may never return, as on a hung NFS or FUSE mount.

Such a call puts its thread into uninterruptible sleep. So the main thread, which must react to Ctrl-C and must not wait
forever, lets another thread make the call.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.base.file_system_kind import is_on_local_file_system
from ckpt.storage.base.threads import start_or_raise

T = TypeVar("T")
P = ParamSpec("P")


class _HasRoot(Protocol):
    root: str


S = TypeVar("S", bound=_HasRoot)

STORE_TIMEOUT_VARIABLE = "CKPT_STORE_TIMEOUT"
"""The environment variable with the seconds after which a call that has not returned, or a save without progress, fails."""

DEFAULT_TIMEOUT_SECONDS = 600.0


def store_timeout_seconds() -> float:
    """Return the value of CKPT_STORE_TIMEOUT; raise InvalidArgument if it is not a positive number."""
    text = os.environ.get(STORE_TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT_SECONDS
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InvalidArgument(f"{STORE_TIMEOUT_VARIABLE}={text!r}: give a positive number of seconds")
    return seconds


class WaitTimer:
    """Counts the seconds for which a thread has waited that polls, up to a limit.

    The time between two polls counts as a tenth of the limit, or as a second, at most. A process that was stopped for an hour,
    as in a suspended job, has not waited for an hour, and neither have the processes for which it waits.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.seconds = 0.0
        self._limit = limit_seconds
        self._longest_interval = max(1.0, limit_seconds / 10)
        self._last_poll = time.monotonic()

    def remaining_seconds(self) -> float:
        """Count the time since the last call; return the seconds that are left, 0 at the end."""
        now = time.monotonic()
        self.seconds += min(now - self._last_poll, self._longest_interval)
        self._last_poll = now
        return max(0.0, self._limit - self.seconds)


class StallTimer:
    """Counts the seconds for which work has made no progress.

    It adds up waited seconds rather than reading a clock: a process that was stopped for an hour has not waited for an hour.
    Several threads may wait for the same work; what they wait at the same time counts once.
    """

    def __init__(self, progress: int = 0) -> None:
        """progress: a number that grows while the work makes progress."""
        self.seconds = 0.0
        self._progress = progress
        self._counted_until = -math.inf
        self._lock = threading.Lock()
        """Guards changes of all attributes."""

    def next_wait_seconds(self) -> float:
        """Return the seconds to wait before the next call of `has_timed_out`."""
        return min(1.0, max(0.0, store_timeout_seconds() - self.seconds))

    def has_timed_out(self, waited_seconds: float, progress: int) -> bool:
        """Add the seconds of one wait that ends now; return whether there was no progress for CKPT_STORE_TIMEOUT seconds."""
        with self._lock:
            now = time.monotonic()
            waited_seconds, self._counted_until = min(waited_seconds, now - self._counted_until), now
            if progress != self._progress:
                self._progress, self.seconds = progress, 0.0
                return False
            self.seconds += waited_seconds
            return self.seconds >= store_timeout_seconds()


def call_in_thread(call: Callable[[], T], what: str) -> T:
    """Return the result of a call that a new thread makes; raise Unavailable after `store_timeout_seconds`.

    The thread of a call that never returns stays, but the end of the process does not wait for it. Raises StoreError if the
    system refuses the thread.

    what: the call, for the message.
    """
    seconds, future = store_timeout_seconds(), Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    start_or_raise(threading.Thread(target=run, name="ckpt-call", daemon=True), what)
    timer = WaitTimer(seconds)
    while remaining_seconds := timer.remaining_seconds():
        if wait([future], min(remaining_seconds, 1.0)).done:
            return future.result()
    raise Unavailable(
        f"{what}: no answer for {seconds:g} s, as a mount hangs or its server is down; restore it or unmount it, "
        f"and start again ({STORE_TIMEOUT_VARIABLE} sets the seconds)"
    )


class StoreFolder:
    """A folder, and whether it is on a local disk. Used without a lock: threads that ask at once get the same answer."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._is_local: bool | None = None

    def is_local(self) -> bool:
        """Return whether the folder is on a local disk, whose calls return. The answer is cached once the folder exists."""
        if self._is_local is None:
            exists, found = call_in_thread(lambda: (os.path.isdir(self.root), is_on_local_file_system(self.root)), self.root)
            if not exists:
                return found
            self._is_local = found
        return self._is_local


@functools.lru_cache(1024)
def folder_at(root: str) -> StoreFolder:
    """Return the folder at a path, the same object for each call."""
    return StoreFolder(root)


def can_block_on(root: str) -> bool:
    """Return whether this thread may call into a folder: the main thread may only if the folder is on a local disk."""
    return threading.current_thread() is not threading.main_thread() or folder_at(root).is_local()


def interruptible(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method of a store with a `root`: another thread makes the call if this one must not block on it."""

    @functools.wraps(method)
    def made(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if can_block_on(self.root):
            return method(self, *args, **kwargs)
        return call_in_thread(functools.partial(method, self, *args, **kwargs), f"{method.__name__} at {self.root}")

    return cast(Callable[Concatenate[S, P], T], made)
