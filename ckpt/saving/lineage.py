"""The line of training that the saves of a session belong to.

Which save goes on from which is decided in the order in which saves begin, without a look at the repository. What the
repository holds is read when the first of them is committed, by the process that commits.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ckpt.format.training_lines import TrainingLine, order_steps
from ckpt.repository.repository import Repository, commit_name
from ckpt.storage.base.errors import CkptError

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _SegmentStart:
    """Where a stretch of saves begins."""

    first_step: int
    """The first step that is saved."""
    restored_step: int | None = None
    """The step that it goes on from, where it was restored in this process."""
    previous: LineSegment | None = None
    """The saves before in this process, behind which it goes back without a restore."""
    is_new_run: bool = False
    """What this process has saved before counts as saved by another run."""


class LineSegment:
    """Saves in a row, all on one line."""

    def __init__(self, repo: Repository, generation: int, damaged: Callable[[], Collection[int]], start: _SegmentStart) -> None:
        self._repo = repo
        self._generation = generation
        self._damaged = damaged
        self._first_step, self._restored_step, self._previous, self._is_new_run = (
            start.first_step,
            start.restored_step,
            start.previous,
            start.is_new_run,
        )
        self._lock = threading.Lock()
        self._line: TrainingLine | None = None

    def line(self) -> TrainingLine:
        """The line of these saves. Reads the repository the first time."""
        with self._lock:
            if self._line is None:
                self._line = self._determine_line()
            return self._line

    def _determine_line(self) -> TrainingLine:
        if self._previous is not None:
            line = self._previous.line()
            opened = line.after_lower_step(self._next_number(line), self._first_step)
            log.info("step %d goes back behind steps of this run: line %d of training begins", self._first_step, opened.number)
            return opened
        if self._is_single_line():
            return TrainingLine()
        lines, unknown = self._repo.lines()
        if not lines:
            return TrainingLine()
        order = order_steps(lines, unknown)
        newest = max(lines, key=order.steps.index)
        if self._restored_step in lines:
            if self._restored_step == newest:
                return order.newest_line
            opened = order.newest_line.after_rollback(
                self._next_number(order.newest_line), lines[self._restored_step], self._restored_step
            )
            log.warning(
                "%s: step %d goes on from step %d, and step %d was saved after that: line %d of training begins, and what was "
                "saved after step %d is abandoned",
                self._repo.url,
                self._first_step,
                self._restored_step,
                newest,
                opened.number,
                self._restored_step,
            )
            return opened
        later = {step for step in order.history() if step > self._first_step and step in lines}
        skipped = later.intersection(self._damaged())  # by a load of this process
        if not all(map(self._is_of_this_writer, later - skipped)):
            self._warn_not_restored(newest)
            return TrainingLine(self._next_number(order.newest_line))
        if not all(map(self._is_of_this_writer, skipped)):
            return order.newest_line.after_lower_step(self._next_number(order.newest_line), self._first_step)
        return order.newest_line

    def _is_single_line(self) -> bool:
        """Whether all is on one line and goes on there. At nearly every start, and no record is read for that."""
        last = self._first_step if self._restored_step is None else self._restored_step
        if (
            any(number > last for number in self._repo.step_numbers() if number != self._first_step)
            or self._repo.line_numbers()
        ):
            return False
        return self._restored_step is None or not self._repo.store.exists(commit_name(self._first_step))

    def _is_of_this_writer(self, step: int) -> bool:
        """Whether this process, or its group, has saved the step: through another group it may do so at the same time."""
        if self._is_new_run:
            return False
        try:
            return self._repo.record(step).generation == self._generation
        except CkptError:
            return False

    def _next_number(self, line: TrainingLine) -> int:
        """Above all that are known, and not below the generation of the writer: jobs that can't see each other's tiers open
        lines of different numbers."""
        return max(self._generation, 1 + max([line.number, *self._repo.line_numbers()]))

    def _warn_not_restored(self, newest: int) -> None:
        message = (
            f"{self._repo.url} has steps up to step {newest} already, and step {self._first_step} is saved without a "
            "restore: it "
            "counts as the newest from now on. The older steps are set aside: `keep` does not delete them, and a new save "
            "of the same number replaces one. To go on from a step restore it first (Checkpointer.restore). To begin a new "
            "run name a new folder, or delete the old steps"
        )
        log.warning(message)
        warnings.warn(message, stacklevel=2)  # of a thread of the save: there is no line of the user's to name


class Lineage:
    """Of a session. May be used by several threads.

    generation: of the writer. damaged: returns the steps that loads of this process have found damaged so far.
    newest: the last step of a lineage that this one takes the place of.
    """

    def __init__(self, repo: Repository, generation: int, damaged: Callable[[], Collection[int]], newest: int = -1) -> None:
        self.repo = repo
        self.base_step: int | None = None
        """The step that was restored, as long as none was committed after that."""
        self._generation = generation
        self._damaged = damaged
        self._lock = threading.Lock()
        self._restored_step: int | None = None
        self._previous_segment: LineSegment | None = None
        self._segment: LineSegment | None = None
        self.newest_step = newest
        """Of the saves that have begun since the last restore."""
        self._is_new_run = False

    def note_restored(self, step: int) -> None:
        """What is saved from now on goes on from this step, -1 for none."""
        with self._lock:
            self._restored_step = self.base_step = None if step < 0 else step
            self._previous_segment = self._segment = None
            self.newest_step, self._is_new_run = step, False

    def note_went_back(self) -> None:
        """A loop goes back behind steps that it has saved, without a restore."""
        with self._lock:
            if self._segment is not None:
                self._previous_segment, self._segment = self._segment, None

    def note_joined(self, step: int) -> None:
        """Another loop of this process begins to save here with this step, and has restored nothing: a new run, where there
        are later ones, as when a cell of a notebook is run again."""
        with self._lock:
            if step < self.newest_step:
                self._restored_step = self.base_step = self._previous_segment = self._segment = None
                self.newest_step, self._is_new_run = step, True

    def begin_save(self, step: int) -> LineSegment:
        """A save of this step begins."""
        with self._lock:
            self.newest_step = max(self.newest_step, step)
            if self._segment is None:
                restored = None if self._previous_segment else self._restored_step
                start = _SegmentStart(step, restored, self._previous_segment, self._is_new_run)
                self._segment = LineSegment(self.repo, self._generation, self._damaged, start)
            return self._segment
