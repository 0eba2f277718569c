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
    run_from_queue(BLOCKS, found.extend, 8)
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
        run_from_queue(BLOCKS, work, 4)
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
        run_from_queue(BLOCKS, work, 4)
    assert not [thread for thread in threading.enumerate() if thread.name == "ckpt-read"], "they still write into the arrays"
