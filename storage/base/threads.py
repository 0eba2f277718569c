"""Threads whose end can be waited for, and a pool of daemon threads for calls that may never return.

The pools of concurrent.futures accept no work after the main thread has ended, while a save may still run. They also wait for
all of their threads at exit, even for one in a call to a host that does not answer.

An interrupt (Ctrl-C) in `threading.Thread.join` of Python 3.11 and 3.12 marks the thread as ended while it still runs, and the
next join returns at once. After one in `threading.Thread.start`, nobody knows whether the thread runs. So threads that use
memory of their caller are `WorkerThread`s.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.forks import call_in_forked_child

T = TypeVar("T")
P = ParamSpec("P")

_TaskQueue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
"""Calls with their futures. None is the end: it stays in the queue for the other threads."""


class WorkerThread(threading.Thread):
    """A thread whose `join` returns only when it has ended, also after an earlier `join` was interrupted.

    If `start` is interrupted, the thread has begun (`has_begun`), and must be joined, or never calls its target.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_ended = threading.Event()
        self._decision = threading.Lock()
        """Taken once, by the thread when it begins, or by a `start` that has failed before that."""
        self._is_cancelled = False

    @property
    def has_begun(self) -> bool:
        """Whether the thread calls its target, or has called it. Certain once `start` has raised an error."""
        return self._decision.locked() and not self._is_cancelled

    def start(self) -> None:
        try:
            super().start()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> bool:
        """Return whether the thread never calls its target: it does not, unless it has begun."""
        if self._decision.acquire(blocking=False):
            self._is_cancelled = True
        return self._is_cancelled

    def run(self) -> None:
        if not self._decision.acquire(blocking=False):
            return
        try:
            super().run()
        finally:
            self._has_ended.set()

    def join(self, timeout: float | None = None) -> None:
        if self._is_cancelled:
            return
        if self.ident is not None:  # otherwise super().join raises the error of a thread that was not started
            self._has_ended.wait(timeout)
        if self.ident is None or self._has_ended.is_set():
            super().join(timeout)


def try_start(thread: threading.Thread) -> bool:
    """Start a thread; return False if the system refuses it, as a container (pids.max) or a user (ulimit -u) has none left."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def start_or_raise(thread: threading.Thread, purpose: str) -> None:
    """Start a thread; raise StoreError if the system refuses it. purpose: what the thread is for, for the message."""
    try:
        thread.start()
    except RuntimeError as error:
        raise StoreError(
            f"can't start a thread for {purpose}: raise the limit of threads (pids.max, ulimit -u), or end other programs"
        ) from error


def start_available(threads: Iterable[threading.Thread]) -> None:
    """Start threads that share the work of their caller; stop at the first one that the system refuses.

    The caller then does the work with fewer threads; `join_all` waits for those that were started.
    """
    for thread in threads:
        if not try_start(thread):
            return


def join_all(threads: Iterable[threading.Thread], when_interrupted: Callable[[BaseException], object]) -> None:
    """Wait until all threads that were started have ended.

    when_interrupted: called with the first interrupt. It makes the threads end, and the interrupt is raised when they have. A
        second interrupt is raised at once.
    """
    started = [thread for thread in threads if thread.ident is not None]
    try:
        for thread in started:
            thread.join()
    except BaseException as error:
        when_interrupted(error)
        for thread in started:
            thread.join()
        raise


class DaemonThreadPool(Executor):
    """An executor of at most `max_threads` daemon threads, started as needed. The end of the process does not wait for them."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._is_closed = False
        self._start_anew()
        _pools.add(self)

    def _start_anew(self) -> None:
        """Begin without tasks and threads. A forked child does so too, because it does not have the threads of its parent."""
        self._tasks: _TaskQueue = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        """Guards `_is_closed`. Guards changes of `_threads`."""
        with self._lock:
            self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._tasks.put, None).atexit = False  # saves may run until the very end

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the next free thread, and return its future. Raise StoreError if the system refuses all threads."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} takes no work any more")
            self._tasks.put((future, partial(call, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_threads:
                thread = WorkerThread(target=_run_tasks, args=(self._tasks, self._idle), name=self._name, daemon=True)
                self._threads.append(thread)  # before the start, which may be interrupted
                try:
                    start_or_raise(thread, self._name)
                except BaseException as error:
                    if not thread.has_begun:
                        self._threads.remove(thread)
                    if not self._threads:  # otherwise one of them makes the call
                        self._tasks.get_nowait()
                    if not self._threads or not isinstance(error, StoreError):
                        raise
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


_pools: weakref.WeakSet[DaemonThreadPool] = weakref.WeakSet()
"""All pools of this process. Only a forked child, which has one thread, reads it."""


def _start_all_anew() -> None:
    for pool in list(_pools):
        pool._start_anew()


call_in_forked_child(_start_all_anew)


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
