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

from ckpt.handle import SaveHandle

LEAD_SECONDS = 3.0
"""From the commit to the step that it names, at least: some times what a rank takes to see a commit."""

LEAD_STEPS = 3


def next_step(now: int, step_seconds: float, interval_seconds: float) -> int:
    """The step to name when training is at `now`. Pure."""
    step_seconds = max(step_seconds, 1e-6)
    lead = LEAD_STEPS + math.ceil(LEAD_SECONDS / step_seconds)
    return now + max(lead, round(interval_seconds / step_seconds))


@dataclass(slots=True)
class Schedule:
    """One rank's knowledge of the next step to save. `interval` gives the seconds between two saves; rank 0 asks it."""

    interval: Callable[[], float]
    _due: int | None = None
    _last: int | None = None
    _gap: int = 100
    _saving: SaveHandle | None = None
    _now: int = 0
    _began: float = 0.0
    _steps: int = 0

    def is_due(self, step: int) -> bool:
        """Whether to save this step. Call it at each step but those before `calm_until`."""
        if self._steps == 0:
            self._began, self._now = time.monotonic(), step - 1
        self._now, self._steps = step, self._steps + max(1, step - self._now)  # those at which nothing is due pass unseen
        if self._last is None:
            return True
        if self._saving is not None and self._saving.done():
            self._learn(self._saving)
        return self._due is not None and step == self._due

    def calm_until(self) -> int | None:
        """The next step that is due; None where that is not known yet."""
        return None if self._saving is not None else self._due

    def missed(self) -> int | None:
        """A step that was due, and that this rank heard of too late; it must tell the others. None again after that."""
        if self._due is None or self._due >= self._now:
            return None
        missed, self._due = self._due, self._due + self._gap
        return missed

    def saving(self, step: int, handle: SaveHandle) -> None:
        """A save of this step has begun."""
        self._last, self._saving, self._due = step, handle, None

    def left_out(self, step: int) -> None:
        """This rank did not save a step that was due."""
        self._last, self._saving, self._due = step, None, step + self._gap

    def propose(self) -> int:
        """For rank 0, when it commits."""
        passed = max(1, self._steps - 1)
        return next_step(self._now, (time.monotonic() - self._began) / passed, self.interval())

    def _learn(self, handle: SaveHandle) -> None:
        self._saving = None
        named = None if handle.unseen() or handle.failed() else handle.result().commit.next_save
        assert self._last is not None
        if named is not None:
            self._due, self._gap = named, max(1, named - self._last)
            return
        # After a save that failed they go on by the gap that all of them know, whenever each of them learns of it.
        behind = max(0, self._now + LEAD_STEPS - self._last)
        self._due = self._last + self._gap * (behind // self._gap + 1)
