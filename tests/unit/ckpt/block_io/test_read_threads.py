"""The threads that read blocks: they share one queue, and an error or interrupt ends them all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from ckpt.block_io.read_threads import run_from_queue

BLOCKS: list[Any] = list(range(10_000))


def test_every_block_is_read_once() -> None:
    found: list[int] = []
    run_from_queue(BLOCKS, found.extend, lambda: 8)
    assert sorted(found) == BLOCKS


def test_the_first_error_ends_all_threads() -> None:
    done: list[int] = []

    def work(blocks: Iterable[Any]) -> None:
        for block in blocks:
            if block == 20:
                raise OSError("the disk")
            done.append(block)
            time.sleep(0.001)

    with pytest.raises(OSError, match="the disk"):
        run_from_queue(BLOCKS, work, lambda: 4)
    assert len(done) < len(BLOCKS)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-read"]


def test_an_interrupt_while_the_caller_waits_for_other_threads_ends_them() -> None:
    caller = threading.current_thread()

    def work(blocks: Iterable[Any]) -> None:
        for _ in blocks:
            if threading.current_thread() is caller:
                return  # the caller has nothing more to read, and waits
            time.sleep(0.01)

    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_from_queue(BLOCKS, work, lambda: 4)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-read"], "they still write into the arrays"


def test_threads_are_started_and_ended_as_their_target_number_changes() -> None:
    """A thread ends before it takes a block if there are too many. The rest of the blocks is read by those that are left."""
    target, lock, seen = 2, threading.Lock(), list[tuple[int, int]]()

    def work(blocks: Iterable[Any]) -> None:
        nonlocal target
        for block in blocks:
            with lock:
                target = 2 if block < 100 else 9 if block < 600 else 3
                seen.append((block, threading.get_ident()))
            time.sleep(0.0005)

    run_from_queue(BLOCKS[:1000], work, lambda: target)
    assert sorted(block for block, _ in seen) == BLOCKS[:1000]
    threads = [
        len({thread for block, thread in seen if begin <= block < end}) for begin, end in ((0, 100), (200, 600), (700, 1000))
    ]
    assert threads == [2, 9, 3]
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-read"]
