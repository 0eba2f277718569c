"""The class Windows, which decides which steps `Keep(every=N)` keeps permanently: the first saved one of each N step numbers.

The windows begin at the multiples of N. In a loop that counts from 0, the number N - 1 means N updates. So a step below a
multiple counts as that multiple, unless the next save is the multiple itself.

Whether a step is kept depends only on itself and on earlier steps of its own training line and of the history of that line. So
no later save, and no roll-back, makes a kept step expire, except that a step of the same number replaces it. A line that a
roll-back has abandoned keeps the steps that began its windows, and the new line keeps some of its own.

A step expires only if an earlier one of its window is complete. So if that one is damaged, the next one is kept, too. A
multiple is always kept, also if it is damaged. Of steps that are known to be damaged, only the first of a window is kept, since
it may have been kept alone for a long time, and a part of it may still be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ckpt.format.training_lines import TrainingLine


class Windows:
    """The windows of `every` step numbers, in the steps of a repository. No method reads the store."""

    def __init__(
        self, every: int, lines: Mapping[int, TrainingLine], unknown_line: TrainingLine, damaged: Collection[int] = ()
    ) -> None:
        """Divide the steps into windows.

        lines: the line of each step whose record can be read.
        unknown_line: the line that the other steps are taken to be on.
        damaged: those of `lines` that are known to be damaged, and not merely unreadable now.
        """
        self._every = every
        self._lines = lines
        self._unknown_line = unknown_line
        self._damaged = damaged
        self._steps: dict[int, list[int]] = {}
        """The steps of each window in ascending order, also those that yield to the multiple after them."""
        for step in sorted(lines):
            self._steps.setdefault((step + 1) // every, []).append(step)

    def is_permanent(self, step: int, is_known_complete: Callable[[int], bool]) -> bool:
        """Return whether a step is kept permanently.

        is_known_complete: returns whether a step is known to be complete. It is called only for steps because of which another
            expires.
        """
        if step % self._every == 0:
            return True
        if step in self._damaged:
            return not any(
                other in self._damaged or is_known_complete(other) for other in self._earlier(step, is_known_complete)
            )
        return not any(is_known_complete(other) for other in self._earlier(step, is_known_complete))

    def _earlier(self, step: int, is_known_complete: Callable[[int], bool]) -> Iterator[int]:
        """Yield the steps before this one in its window that are part of its history, in ascending order."""
        line = self._lines.get(step, self._unknown_line)
        yields = self._has_multiple_next(step) and is_known_complete(step + 1)
        for other in self._steps.get((step + (not yields)) // self._every, ()):
            if other >= step:
                return
            if line.has_in_history(self._lines[other], other) and not self._has_multiple_next(other):
                yield other

    def _has_multiple_next(self, step: int) -> bool:
        """Return whether the next save after a step, on the same line, was a multiple that is one above it."""
        line, next_line = self._lines.get(step, self._unknown_line), self._lines.get(step + 1)
        return (step + 1) % self._every == 0 and next_line is not None and next_line.number == line.number
