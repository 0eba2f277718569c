"""The class Lineage, which decides to which training line the saves of a session belong.

When a save begins, the lineage decides from memory which earlier save it continues. The committing process reads the
repository when the first of consecutive saves on a line is committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ckpt.format.training_lines import TrainingLine
from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.storage.base.errors import CkptError, NotFound, is_damage
from ckpt.support.user_warning import warn_user

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _SavesStart:
    """How consecutive saves begin: the first of them, and what was before it."""

    first_step: int
    """The first step that is saved."""
    restored_step: int | None = None
    """The step from which the saves continue, if this process has restored one."""
    previous: LineSaves | None = None
    """The earlier saves of this process, if the loop saves a lower number than they have, without a restore."""
    is_new_run: bool = False
    """Whether earlier saves of this process count as those of another run."""


class LineSaves:
    """Consecutive saves of a session, all on one training line."""

    def __init__(self, repo: Repository, generation: int, damaged: Callable[[], Collection[int]], start: _SavesStart) -> None:
        self._repo = repo
        self._generation = generation
        self._damaged = damaged
        self._first_step = start.first_step
        self._restored_step = start.restored_step
        self._previous = start.previous
        self._is_new_run = start.is_new_run
        self._lock = threading.Lock()
        """Guards `_line`. It is held while the repository is read, so that it is read once."""
        self._line: TrainingLine | None = None

    def line(self) -> TrainingLine:
        """Return the training line of these saves. The first call reads the repository."""
        with self._lock:
            if self._line is None:
                self._line = self._determine_line()
            return self._line

    def _determine_line(self) -> TrainingLine:
        if self._previous is not None:
            line = self._previous.line()
            opened = line.after_lower_step(self._next_number(line), self._first_step)
            log.info("step %d is lower than saved steps of this run: training line %d begins", self._first_step, opened.number)
            return opened
        if self._is_single_line():
            return TrainingLine()
        found = self._repo.lines()
        if self._restored_step is not None and (unread := found.errors.get(self._restored_step)) is not None:
            raise unread  # without its line, the step would count as not restored, and the old steps as those of another run
        if (newest := found.newest()) is None:  # there are no steps, or all are damaged, and then this line must be the newest
            opened_number = found.order.newest_line.number
            return TrainingLine(self._next_number(found.order.newest_line)) if opened_number else TrainingLine()
        lines, order = found.known, found.order
        if self._restored_step in lines:
            if self._restored_step == newest and self._first_step >= newest:
                return order.newest_line
            opened = order.newest_line.after_rollback(
                self._next_number(order.newest_line), lines[self._restored_step], self._restored_step
            )
            if self._restored_step == newest:
                log.info(
                    "the new step %d continues from step %d, which is higher: training line %d begins",
                    self._first_step, newest, opened.number,
                )  # fmt: skip
                return opened
            log.warning(
                "%s: the new step %d continues from step %d; the steps that were saved after step %d, the newest of them %d, "
                "are abandoned (training line %d)",
                self._repo.url, self._first_step, self._restored_step, self._restored_step, newest, opened.number,
            )  # fmt: skip
            return opened
        later = {step for step in order.history() if step > self._first_step and step in lines}
        skipped = later.intersection(self._damaged())  # a load of this process has skipped them
        if not all(map(self._is_of_this_writer, later - skipped)):
            self._warn_not_restored(newest)
            return TrainingLine(self._next_number(order.newest_line))
        if not all(map(self._is_of_this_writer, skipped)):
            return order.newest_line.after_lower_step(self._next_number(order.newest_line), self._first_step)
        return order.newest_line

    def _is_single_line(self) -> bool:
        """Return whether all steps are on one line and the saves continue it, as is usual; reads no commit record."""
        last = self._first_step if self._restored_step is None else self._restored_step
        if self._first_step < last:
            return False
        has_later_step = any(number > last for number in self._repo.step_numbers() if number != self._first_step)
        if has_later_step or self._repo.line_numbers():
            return False
        return self._restored_step is None or not self._repo.store.exists(commit_name(self._first_step))

    def _is_of_this_writer(self, step: int) -> bool:
        """Return whether this process or a group of it has saved the step; several groups may save at the same time."""
        if self._is_new_run:
            return False
        try:
            return self._repo.record(step).generation == self._generation
        except NotFound:
            return False
        except CkptError as error:
            if not is_damage(error):
                raise
            return False

    def _next_number(self, line: TrainingLine) -> int:
        """Return a number above all known lines, and not below the generation of the writer.

        So jobs that can't see each other's tiers open lines with different numbers.
        """
        return max(self._generation, 1 + max([line.number, *self._repo.line_numbers()]))

    def _warn_not_restored(self, newest: int) -> None:
        message = (
            f"{self._repo.url} has steps up to step {newest}, and step {self._first_step} is saved without a restore: the old "
            "steps are set aside; call Checkpointer.restore first to continue them, or use a new folder"
        )
        log.warning(message)
        warn_user(message)


class Lineage:
    """The training line of the saves of one session. Several threads may use it."""

    def __init__(self, repo: Repository, generation: int, damaged: Callable[[], Collection[int]], newest: int = -1) -> None:
        """generation: of the writer lease.
        damaged: returns the steps that loads of this process have found damaged so far.
        newest: the last step of the lineage that this one replaces; -1 if none.
        """
        self.repo = repo
        self.base_step: int | None = None
        """The restored step, until a step is committed after it."""
        self._generation = generation
        self._damaged = damaged
        self._lock = threading.Lock()
        """Guards `_restored_step`, `_previous_saves`, `_saves` and `_is_new_run`. Guards changes of `base_step` and
        `newest_step`."""
        self._restored_step: int | None = None
        self._previous_saves: LineSaves | None = None
        self._saves: LineSaves | None = None
        self.newest_step = newest
        """The newest step of the saves since the last restore."""
        self._is_new_run = False

    def note_restored(self, step: int) -> None:
        """Record that the next saves continue from this step; -1 for none."""
        with self._lock:
            self._restored_step = self.base_step = None if step < 0 else step
            self._previous_saves = self._saves = None
            self.newest_step, self._is_new_run = step, False

    def note_went_back(self) -> None:
        """Record that a loop saves a lower step than before, without a restore."""
        with self._lock:
            if self._saves is not None:
                self._previous_saves, self._saves = self._saves, None

    def note_joined(self, step: int) -> None:
        """Record that another loop of this process begins to save with this step, and has restored nothing.

        If there are later steps, this is a new run, for example because a cell of a notebook was run again.
        """
        with self._lock:
            if step < self.newest_step:
                self._restored_step = self.base_step = self._previous_saves = self._saves = None
                self.newest_step, self._is_new_run = step, True

    def note_committed(self) -> None:
        """Record that a step was committed after the restored one."""
        with self._lock:
            self.base_step = None

    def begin_save(self, step: int) -> LineSaves:
        """Record that a save of this step begins, and return the consecutive saves to which it belongs."""
        with self._lock:
            self.newest_step = max(self.newest_step, step)
            if self._saves is None:
                restored = None if self._previous_saves else self._restored_step
                start = _SavesStart(step, restored, self._previous_saves, self._is_new_run)
                self._saves = LineSaves(self.repo, self._generation, self._damaged, start)
            return self._saves
