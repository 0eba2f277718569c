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

from ckpt.lines import Line, in_order
from ckpt.repository import Repository, commit_name
from ckpt.storage.errors import CkptError

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a stretch of saves begins."""

    first: int
    """The first step that is saved."""
    restored: int | None = None
    """The step that it goes on from, where it was restored in this process."""
    after: Stretch | None = None
    """The saves before in this process, behind which it goes back without a restore."""
    anew: bool = False
    """What this process has saved before counts as saved by another run."""


class Stretch:
    """Saves in a row, all on one line."""

    def __init__(self, repo: Repository, generation: int, damaged: Callable[[], Collection[int]], start: _Start) -> None:
        self._repo = repo
        self._generation = generation
        self._damaged = damaged
        self._first, self._restored, self._after, self._anew = start.first, start.restored, start.after, start.anew
        self._lock = threading.Lock()
        self._line: Line | None = None

    def line(self) -> Line:
        """The line of these saves. Reads the repository the first time."""
        with self._lock:
            if self._line is None:
                self._line = self._found()
            return self._line

    def _found(self) -> Line:
        if self._after is not None:
            line = self._after.line()
            opened = line.going_down(self._next_number(line), self._first)
            log.info("step %d goes back behind steps of this run: line %d of training begins", self._first, opened.number)
            return opened
        if self._is_plain():
            return Line()
        known, unknown = self._repo.lines()
        if not known:
            return Line()
        order = in_order(known, unknown)
        newest = max(known, key=order.steps.index)
        if self._restored in known:
            if self._restored == newest:
                return order.newest
            opened = order.newest.going_back(self._next_number(order.newest), known[self._restored], self._restored)
            log.warning(
                "%s: step %d goes on from step %d, and step %d was saved after that: line %d of training begins, and what was "
                "saved after step %d is abandoned", self._repo.url, self._first, self._restored, newest, opened.number,
                self._restored,
            )  # fmt: skip
            return opened
        later = {step for step in order.live() if step > self._first and step in known}
        passed_over = later.intersection(self._damaged())  # by a load of this process
        if not all(map(self._is_of_this_writer, later - passed_over)):
            self._warn(newest)
            return Line(self._next_number(order.newest))
        if not all(map(self._is_of_this_writer, passed_over)):
            return order.newest.going_down(self._next_number(order.newest), self._first)
        return order.newest

    def _is_plain(self) -> bool:
        """Whether all is on one line and goes on there. At nearly every start, and no record is read for that."""
        last = self._first if self._restored is None else self._restored
        if any(number > last for number in self._repo.step_numbers() if number != self._first) or self._repo.line_numbers():
            return False
        return self._restored is None or not self._repo.store.exists(commit_name(self._first))

    def _is_of_this_writer(self, step: int) -> bool:
        """Whether this process, or its group, has saved the step: through another group it may do so at the same time."""
        if self._anew:
            return False
        try:
            return self._repo.record(step).generation == self._generation
        except CkptError:
            return False

    def _next_number(self, line: Line) -> int:
        """Above all that are known, and not below the generation of the writer: jobs that can't see each other's tiers open
        lines of different numbers."""
        return max(self._generation, 1 + max([line.number, *self._repo.line_numbers()]))

    def _warn(self, newest: int) -> None:
        message = (
            f"{self._repo.url} has steps up to step {newest} already, and step {self._first} is saved without a restore: it "
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
        self.base: int | None = None
        """The step that was restored, as long as none was committed after that."""
        self._generation = generation
        self._damaged = damaged
        self._lock = threading.Lock()
        self._restored: int | None = None
        self._before: Stretch | None = None
        self._stretch: Stretch | None = None
        self.newest = newest
        """Of the saves that have begun since the last restore."""
        self._anew = False

    def restored(self, step: int) -> None:
        """What is saved from now on goes on from this step, -1 for none."""
        with self._lock:
            self._restored = self.base = None if step < 0 else step
            self._before = self._stretch = None
            self.newest, self._anew = step, False

    def went_back(self) -> None:
        """A loop goes back behind steps that it has saved, without a restore."""
        with self._lock:
            if self._stretch is not None:
                self._before, self._stretch = self._stretch, None

    def joined(self, step: int) -> None:
        """Another loop of this process begins to save here with this step, and has restored nothing: a new run, where there
        are later ones, as when a cell of a notebook is run again."""
        with self._lock:
            if step < self.newest:
                self._restored = self.base = self._before = self._stretch = None
                self.newest, self._anew = step, True

    def begin(self, step: int) -> Stretch:
        """A save of this step begins."""
        with self._lock:
            self.newest = max(self.newest, step)
            if self._stretch is None:
                restored = None if self._before else self._restored
                start = _Start(step, restored, self._before, self._anew)
                self._stretch = Stretch(self.repo, self._generation, self._damaged, start)
            return self._stretch
