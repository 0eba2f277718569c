"""The steps of a training loop that need nothing but a heartbeat, because no save is due."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from ckpt.training.heartbeat_page import HeartbeatPage
from ckpt.training.save_interval import Every
from ckpt.training.save_schedule import SaveSchedule


class IdleWindow(NamedTuple):
    """The steps that need nothing but a heartbeat. It is a tuple because each of these steps unpacks it."""

    page: HeartbeatPage
    after_step: int
    until_step: int
    """The first step that may need more."""
    deadline_ns: int
    """The time on CLOCK_MONOTONIC from which a step may need more."""


def idle_window_after(
    step: int, page: HeartbeatPage, every: Every, schedule: SaveSchedule | None, next_save_at: Callable[[], float]
) -> IdleWindow | None:
    """Return the window up to the next save, while no save runs; None if that save is unknown.

    next_save_at: returns when a save by time is due without a schedule, in seconds of CLOCK_MONOTONIC.
    """
    until_step, deadline_ns = sys.maxsize, sys.maxsize
    if isinstance(every, int):
        until_step = step + every - (step + 1) % every
    elif schedule is not None:
        if (due := schedule.next_due_step()) is None:
            return None
        until_step = due
    elif every is not None:
        deadline_ns = int(1e9 * next_save_at())
    return IdleWindow(page, step, until_step, deadline_ns)
