"""How long threads have waited for work without progress."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ckpt.saving.handle import SaveHandle
from ckpt.storage.base import call_timeout
from ckpt.storage.base.call_timeout import STORE_TIMEOUT_VARIABLE, StallTimer


def test_waits_of_several_threads_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(call_timeout.time, "monotonic", lambda: now)
    monkeypatch.setenv(STORE_TIMEOUT_VARIABLE, "10")
    timer = StallTimer()
    for _ in range(4):
        assert not timer.has_timed_out(1.0, 0)
    assert timer.seconds == 1.0
    for number in range(2, 10):
        now += 1.0
        assert [timer.has_timed_out(1.0, 0) for _ in range(4)] == [False] * 4
        assert timer.seconds == number
    now += 3600.0  # the process was stopped
    assert timer.has_timed_out(1.0, 0)
    assert timer.seconds == 10.0


@pytest.mark.slow
def test_threads_that_wait_for_one_save_give_up_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_TIMEOUT_VARIABLE, "3")
    handle, ended, began = SaveHandle(1), list[Any](), time.monotonic()
    threads = [threading.Thread(target=lambda: ended.append(handle.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert ended == [False] * 4
    assert time.monotonic() - began >= 3.0, "each thread has counted the waits of the others"
    assert handle.has_stalled()
