"""Lines of training: which steps are the history of the newest one, and which were left behind by a roll-back. Pure.

A *line* is a row of saves of which each goes on from the one before. It has a number, from 0 on. A run that goes back to an
older step, and then saves, opens a new line. The order of steps is (line, number of the step): whatever was saved after the
roll-back is newer than whatever was saved before it.

A line states for older lines the last step that belongs to its history, -1 where none does. What an older line has beyond
that is *abandoned*. A line that the newest one does not mention at all is *set aside*: a run that began anew beside the steps
of another one knows nothing of it, and retention never deletes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Ancestry = tuple[tuple[int, int], ...]
"""Older lines, ascending, each with the last of its steps that belongs to the history of this line, -1 for none."""


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """A line of training."""

    number: int = 0
    ancestry: Ancestry = ()

    def has_in_history(self, other: TrainingLine, step: int) -> bool:
        """Whether a step of another line, or of this one, is part of the history of this line."""
        return other.number == self.number or step <= dict(self.ancestry).get(other.number, -1)

    def has_abandoned(self, other: TrainingLine, step: int) -> bool:
        """Whether this line was opened by going back from a step, or from an ancestor of it."""
        return other.number in dict(self.ancestry) and not self.has_in_history(other, step)

    def after_rollback(self, number: int, to: TrainingLine, step: int) -> TrainingLine:
        """The line of this number that is opened where this one is the newest and `step` of the line `to` is restored."""
        left = dict.fromkeys((*dict(self.ancestry), self.number), -1)
        return TrainingLine(number, tuple(sorted({**left, **dict(to.ancestry), to.number: step}.items())))

    def after_lower_step(self, number: int, below: int) -> TrainingLine:
        """The line of this number that is opened where this one goes on with a step whose number is not above its last."""
        left = {**dict(self.ancestry), self.number: below - 1}
        return TrainingLine(number, tuple(sorted((older, min(last, below - 1)) for older, last in left.items())))


def parse_line(number: Any, left: Any) -> TrainingLine:
    """The line that a record states; raise ValueError where it is none."""
    found = TrainingLine(number, tuple((older, last) for older, last in left))
    for older, last in ((number, -1), *found.ancestry):
        if type(older) is not int or type(last) is not int or not 0 <= older <= number or last < -1:
            raise ValueError(f"line {number!r} with {left!r}")
    return found


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The steps of a repository, by when they were saved."""

    steps: tuple[int, ...]
    """All of them. The last one is the newest, and its history comes after all other steps."""
    newest_line: TrainingLine
    """The line of the newest step."""
    abandoned: frozenset[int] = frozenset()
    """Steps that a roll-back has left behind."""
    set_aside: frozenset[int] = frozenset()
    """Steps of other runs: the newest line does not mention theirs."""

    def history(self) -> tuple[int, ...]:
        """The history of the newest step, oldest first, and the newest step."""
        return tuple(step for step in self.steps if step not in self.abandoned and step not in self.set_aside)

    def newest_first(self, before: int | None = None) -> list[int]:
        """In which order to try to load the steps. before: steps of the history that are below it come first."""
        live = self.history()
        others = self.steps[: len(self.steps) - len(live)]
        below = [step for step in live if before is None or step < before]
        above = [step for step in live if before is not None and step >= before]
        return [*reversed(below), *reversed(above), *reversed(others)]


def order_steps(lines: Mapping[int, TrainingLine], unknown: Collection[int] = ()) -> StepOrder:
    """The order of steps of which each is on one of these lines.

    unknown: steps whose records could not be read. They take the place that their number has on the newest line, so that
    none is passed over unseen.
    """
    newest = max(((line.number, step, line) for step, line in lines.items()), key=lambda found: found[:2], default=None)
    line = TrainingLine() if newest is None else newest[2]
    found = {**dict.fromkeys(unknown, line), **lines}
    others = {step for step, its in found.items() if not line.has_in_history(its, step)}
    abandoned = frozenset(step for step in others if line.has_abandoned(found[step], step))
    return StepOrder(
        tuple(sorted(found, key=lambda step: (step not in others, found[step].number, step))),
        line, abandoned, frozenset(others - abandoned),
    )  # fmt: skip


def order_by_number(steps: Iterable[int]) -> StepOrder:
    """The order of steps that are all on the first line."""
    return StepOrder(tuple(sorted(steps)), TrainingLine())
