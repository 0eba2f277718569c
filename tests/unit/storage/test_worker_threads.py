"""Threads whose end can be waited for, also by a caller that was interrupted while it waited."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import finish, python, until

import ckpt
from ckpt.storage.base.threads import DaemonThreadPool, WorkerThread, join_all

FOLDERS = ("ckpt", "storage", "aggregator", "recovery", "tools")


def interrupt_soon() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_join_after_an_interrupted_one_waits_until_the_thread_has_ended() -> None:
    release, ended = threading.Event(), []
    thread = WorkerThread(target=lambda: (release.wait(), time.sleep(0.2), ended.append(True)))
    thread.start()
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        thread.join()
    release.set()
    thread.join()
    assert ended
    assert not thread.is_alive()


def interrupt_starts(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let an interrupt arrive right after the system has made a thread, which begins when the returned event is set."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    go, make = threading.Event(), getattr(threading, name)

    def start_new_thread(begin: Callable[[], object], *args: Any, **options: Any) -> None:
        make(lambda: (go.wait(), begin()), *args, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading, name, start_new_thread)
    return go


def test_a_thread_whose_start_is_interrupted_before_it_begins_never_calls_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would know that it runs, nor wait for its end."""
    called: list[bool] = []
    thread = WorkerThread(target=called.append, args=(True,))
    with monkeypatch.context() as patches:
        go = interrupt_starts(patches)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
    assert not thread.has_begun
    go.set()
    thread.join()
    until(lambda: thread.ident is not None and not thread.is_alive())
    assert called == []


def test_a_pool_waits_for_a_thread_whose_start_is_interrupted_after_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun, release, ended = threading.Thread.start, threading.Event(), threading.Event(), []

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        begun.wait()
        signal.raise_signal(signal.SIGINT)

    pool = DaemonThreadPool(2, "a")
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(lambda: (begun.set(), release.wait(), time.sleep(0.2), ended.append(True)))
    release.set()
    pool.shutdown()
    assert ended


def test_join_all_makes_the_threads_end_and_then_raises_the_interrupt() -> None:
    stop, ended, found = threading.Event(), [], []

    def work() -> None:
        stop.wait()
        time.sleep(0.1)
        ended.append(True)

    def when_interrupted(error: BaseException) -> None:
        found.append(type(error))
        stop.set()

    threads = [WorkerThread(target=work) for _ in range(3)]
    for thread in threads[:2]:
        thread.start()
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        join_all(threads, when_interrupted)
    assert found == [KeyboardInterrupt]
    assert len(ended) == 2  # the third one was never started


def test_a_join_with_a_timeout_returns_in_time() -> None:
    release = threading.Event()
    thread = WorkerThread(target=release.wait)
    thread.start()
    thread.join(0.01)
    assert thread.is_alive()
    release.set()
    thread.join()
    assert not thread.is_alive()


def test_every_thread_that_somebody_joins_is_a_worker_thread() -> None:
    repository = Path(ckpt.__file__).parents[1]
    plain = []
    for path in sorted(p for folder in FOLDERS for p in (repository / folder).rglob("*.py")):
        text = path.read_text()
        if re.search(r"\bthreading\.Thread\(", text) and re.search(r"\w\.join\(\)", text):
            plain.append(path.name)
    assert plain == []


def test_a_call_that_gets_no_thread_is_made_by_another_one_or_never() -> None:
    code = """
import resource, threading
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.threads import DaemonThreadPool

pool, empty, begun, go = DaemonThreadPool(4, "a"), DaemonThreadPool(4, "b"), threading.Event(), threading.Event()
made = []
first = pool.submit(lambda: (begun.set(), go.wait()))
begun.wait()
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), -1))
threading.stack_size(1 << 30)  # no thread gets so much
second = pool.submit(made.append, "second")
try:
    empty.submit(made.append, "third")
except StoreError as error:
    print(error.__cause__)
threading.stack_size(0)
go.set()
second.result()
empty.submit(made.append, "fourth").result()
print(made)
"""
    assert finish(python(code)).splitlines() == ["can't start new thread", "['second', 'fourth']"]
