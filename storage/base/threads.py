"""A thread pool of daemon threads, for calls that may never return and for work at the end of the program.

The pools of concurrent.futures accept no work after the main thread has ended, while a save may still run. They also wait for
all of their threads at exit, even for one in a call to a host that does not answer.
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
"""Calls with their futures. None is the end: it stays in the queue for the other threads."""


class DaemonThreadPool(Executor):
    """An executor of at most `max_threads` daemon threads, started as needed. The end of the process does not wait for them."""

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
        """Queue a call for the next free thread, and return its future."""
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
        """Accept no more calls. cancel_futures: cancel the calls that no thread has started."""
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
    """Run the loop of one thread. It has no reference to the pool, so that an unclosed pool can be freed."""
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
        del task, future, call  # do not keep them alive while waiting for the next task
