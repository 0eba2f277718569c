"""How many threads copy from the page cache at the same time."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

from ckpt.block_io.copy_slots import copy_slots
from ckpt.support.runtime import processor_count


def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    with ExitStack() as slots:
        for _ in range(processor_count()):
            slots.enter_context(copy_slots.slot())
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            with copy_slots.slot():
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert status == 0, "the child waited until its alarm"
