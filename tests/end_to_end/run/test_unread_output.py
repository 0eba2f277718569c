"""ckpt-run continues if nobody reads its output: a stopped reader of a pipe, a hung ssh session, a terminal after Ctrl-S."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from helpers.runs import Run, assert_result
from helpers.runs import start as start
from helpers.unread_pipe import full_pipe


def test_a_killed_rank_starts_again_although_nobody_reads_the_messages(start: Callable[..., Run]) -> None:
    with full_pipe() as (_, unread):
        run = start("--show", "all", steps=100, stdout=unread, stderr=unread)
        run.until_step(12)
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.end() == 0
    assert_result(run, 100)
    assert run.failures() == [("signal", [1])]
