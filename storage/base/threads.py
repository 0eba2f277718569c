"""Threads for calls that may not come back, and for what is still to be done when the program has come to its end.

The pools of concurrent.futures take no work from the moment when the main thread has ended, while a save may be under way, and
then wait for all of their threads, also for one in a call to a host that does not answer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_TaskQueue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
"""None, which stays in it: there will be no more."""


class DaemonThreadPool(Executor):
    """An executor of at most so many threads, started as they are needed. The end of the process waits for none of them."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._tasks: _TaskQueue = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        weakref.finalize(self, self._tasks.put, None).atexit = False  # saves may go on until the very end

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call it as soon as there is a thread for it."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} takes no work any more")
            self._tasks.put((future, partial(call, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_threads:
                thread = threading.Thread(target=_run_tasks, args=(self._tasks, self._idle), name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. cancel_futures: those that no thread has begun are not made."""
        with self._lock:
            self._is_closed = True
            if cancel_futures:
                _cancel_all(self._tasks)
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


def _cancel_all(tasks: _TaskQueue) -> None:
    while True:
        try:
            task = tasks.get_nowait()
        except Empty:
            return
        if task is not None:
            task[0].cancel()


def _run_tasks(tasks: _TaskQueue, idle: threading.Semaphore) -> None:
    """What one thread does. It does not hold the pool, which may be forgotten without having been closed."""
    while True:
        try:
            task = tasks.get_nowait()
        except Empty:
            idle.release()
            task = tasks.get()
        if task is None:
            tasks.put(None)
            return
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del task, future, call  # while it waits for the next one
