"""Schedules saves by time for a group, so that all ranks save the same step and exchange no messages.

The clock of each rank would choose another step. So rank 0 chooses the next step and writes it into the commit record of the
previous save, for which every rank waits anyway. The step is far enough ahead that all ranks have read the record by then. The
first step of a run is always saved: that measures the cost of a save, and shows that saving works. If it is committed before
the second step has ended, nobody knows yet how long a step takes, and the next save follows soon.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.saving.handle import SaveHandle

LEAD_SECONDS = 3.0
"""The least time from a commit to the step that it schedules: several times what a rank takes to see a commit."""

LEAD_STEPS = 3
"""The steps that are added to `LEAD_SECONDS`."""

FIRST_LEAD_STEPS = 20
"""The lead before a step was measured. A step then takes longer than the whole save, so all ranks see the commit in time."""


def next_step(now: int, step_seconds: float, interval_seconds: float) -> int:
    """Return the step to save next when training is at step `now`. This is a pure function."""
    step_seconds = max(step_seconds, 1e-6)
    lead = LEAD_STEPS + math.ceil(LEAD_SECONDS / step_seconds)
    return now + max(lead, round(interval_seconds / step_seconds))


@dataclass(slots=True)
class SaveSchedule:
    """One rank's state of the schedule: the next step to save, if the rank knows it yet.

    It has no lock. The training thread calls all methods except `propose_next_step`, which a committing thread of rank 0 calls.
    That reads the counts of the training thread, and a count that is one step old does no harm. It alone changes `_measured_to`
    and `_step_seconds`, except that `restored` clears them when no save runs.
    """

    interval_seconds: Callable[[], float]
    """Returns the seconds between two saves; only rank 0 calls it."""
    _due_step: int | None = None
    _last_step: int | None = None
    _gap_steps: int = 100
    _pending_save: SaveHandle | None = None
    _current_step: int = 0
    _started_at: float = 0.0
    _step_count: int = 0
    _stride: int = 0  # all numbers of steps that are reported differ by multiples of this
    _measured_to: tuple[float, int] | None = None  # time and step count of the last measurement
    _step_seconds: float | None = None  # what it has found

    def is_due(self, step: int) -> bool:
        """Return whether to save this step. The caller may leave out steps before `next_due_step`."""
        if self._last_step is not None and step < min(self._last_step, self._current_step):
            # The loop has begun again at an older step, without a restore, so it may never reach the due step. All ranks save
            # this step. `_last_step` is the same on all ranks, unlike `_current_step`, as each may leave out other steps.
            self._due_step = self._last_step = self._pending_save = None
            self._stride = 0
        elif self._step_count == 0:
            self._started_at, self._current_step = time.monotonic(), step - 1
        else:
            self._stride = math.gcd(self._stride, step - self._current_step)
        passed = max(1, step - self._current_step)  # more than one if the caller has left out steps
        self._current_step, self._step_count = step, self._step_count + passed
        if self._last_step is None:
            return True
        if self._pending_save is not None and self._pending_save.done():
            self._update_from(self._pending_save)
        return self._due_step is not None and step == self._due_step

    def next_due_step(self) -> int | None:
        """Return the next step to save, or None if it is not known yet."""
        return None if self._pending_save is not None else self._due_step

    def take_missed_step(self) -> int | None:
        """Return, once, a step that was due before this rank knew it, or None. The caller must report it to the others."""
        if self._due_step is None or self._due_step >= self._current_step:
            return None
        missed, self._due_step = self._due_step, self._due_step + self._gap_steps
        return missed

    def save_started(self, step: int, handle: SaveHandle) -> None:
        """Record that a save of this step has begun."""
        self._last_step, self._pending_save, self._due_step = step, handle, None

    def save_skipped(self, step: int) -> None:
        """Record that this rank did not save a step that was due."""
        self._last_step, self._pending_save, self._due_step = step, None, step + self._gap_steps

    def restored(self) -> None:
        """Begin anew, because all ranks have restored a step: the step that was due may be far ahead."""
        self._due_step = self._last_step = self._pending_save = None
        self._step_count = self._stride = 0
        self._measured_to = self._step_seconds = None

    def propose_next_step(self) -> int:
        """Return the step to save next. Rank 0 calls it when it commits."""
        now, step_seconds = self._current_step, self._measure_step_seconds()
        named = now + FIRST_LEAD_STEPS if step_seconds is None else next_step(now, step_seconds, self.interval_seconds())
        return named + (self._current_step - named) % max(1, self._stride)

    def _measure_step_seconds(self) -> float | None:
        """Return the seconds of a step since the last save or before it; None if no step has ended since the first one.

        The smaller number counts: a pause, such as an evaluation or a stop of the process, makes no later step slower.
        """
        now, count, before = time.monotonic(), self._step_count, self._step_seconds
        since, first = self._measured_to or (self._started_at, 1)
        if count <= first:
            return before
        self._measured_to, self._step_seconds = (now, count), (now - since) / (count - first)
        return self._step_seconds if before is None else min(before, self._step_seconds)

    def _update_from(self, handle: SaveHandle) -> None:
        self._pending_save = None
        named = None if handle.has_error_to_raise() or handle.failed() else handle.result().commit.next_save
        assert self._last_step is not None
        if named is not None:
            self._due_step, self._gap_steps = named, max(1, named - self._last_step)
            return
        # A failed save schedules no step, so the last gap is used again. A rank that learns late of the failure reports each
        # step that it has passed: so all ranks attempt the same steps, by a save or by a report.
        self._due_step = self._last_step + self._gap_steps
