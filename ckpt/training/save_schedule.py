"""When the ranks of a group save, where that is counted in seconds: all at the same step, and without talking.

Each rank's clock would name another step. So rank 0 names the next one, in the commit record of the step before, which every
rank waits for anyway. It lies far enough ahead that all have read the record by then. The first step of a run is saved in any
case: by it the cost is known, and that saving works.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.saving.handle import SaveHandle

LEAD_SECONDS = 3.0
"""From the commit to the step that it names, at least: some times what a rank takes to see a commit."""

LEAD_STEPS = 3


def next_step(now: int, step_seconds: float, interval_seconds: float) -> int:
    """The step to name when training is at `now`. Pure."""
    step_seconds = max(step_seconds, 1e-6)
    lead = LEAD_STEPS + math.ceil(LEAD_SECONDS / step_seconds)
    return now + max(lead, round(interval_seconds / step_seconds))


@dataclass(slots=True)
class SaveSchedule:
    """One rank's knowledge of the next step to save. `interval` gives the seconds between two saves; rank 0 asks it."""

    interval_seconds: Callable[[], float]
    _due_step: int | None = None
    _last_step: int | None = None
    _gap_steps: int = 100
    _pending_save: SaveHandle | None = None
    _current_step: int = 0
    _started_at: float = 0.0
    _step_count: int = 0

    def is_due(self, step: int) -> bool:
        """Whether to save this step. Call it at each step but those before `calm_until`."""
        if self._step_count == 0:
            self._started_at, self._current_step = time.monotonic(), step - 1
        self._current_step, self._step_count = (
            step,
            self._step_count + max(1, step - self._current_step),
        )  # those at which nothing is due pass unseen
        if self._last_step is None:
            return True
        if self._pending_save is not None and self._pending_save.done():
            self._update_from(self._pending_save)
        return self._due_step is not None and step == self._due_step

    def next_due_step(self) -> int | None:
        """The next step that is due; None where that is not known yet."""
        return None if self._pending_save is not None else self._due_step

    def take_missed_step(self) -> int | None:
        """A step that was due, and that this rank heard of too late; it must tell the others. None again after that."""
        if self._due_step is None or self._due_step >= self._current_step:
            return None
        missed, self._due_step = self._due_step, self._due_step + self._gap_steps
        return missed

    def save_started(self, step: int, handle: SaveHandle) -> None:
        """A save of this step has begun."""
        self._last_step, self._pending_save, self._due_step = step, handle, None

    def save_skipped(self, step: int) -> None:
        """This rank did not save a step that was due."""
        self._last_step, self._pending_save, self._due_step = step, None, step + self._gap_steps

    def propose_next_step(self) -> int:
        """For rank 0, when it commits."""
        passed = max(1, self._step_count - 1)
        return next_step(self._current_step, (time.monotonic() - self._started_at) / passed, self.interval_seconds())

    def _update_from(self, handle: SaveHandle) -> None:
        self._pending_save = None
        named = None if handle.unseen() or handle.failed() else handle.result().commit.next_save
        assert self._last_step is not None
        if named is not None:
            self._due_step, self._gap_steps = named, max(1, named - self._last_step)
            return
        # After a save that failed they go on by the gap that all of them know, whenever each of them learns of it.
        behind = max(0, self._current_step + LEAD_STEPS - self._last_step)
        self._due_step = self._last_step + self._gap_steps * (behind // self._gap_steps + 1)
