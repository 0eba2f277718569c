"""Training lines: which steps are the history of the newest step, and which a roll-back abandoned. Pure.

A *line* is a sequence of saves in which each continues from the one before. Lines are numbered from 0. A run that goes back to
an older step and then saves opens a new line. Steps are ordered by (line, step number): all steps saved after the roll-back are
newer than all steps saved before it.

A line states for each older line the last step that belongs to its history, -1 for none. Later steps of the older line are
*abandoned*. Steps of a line that the newest line does not mention are *set aside*: they belong to another run, and retention
never deletes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

Ancestry = tuple[tuple[int, int], ...]
"""Older lines in ascending order, each with its last step in the history of this line, -1 for none."""


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """A training line: its number, and how much of each older line is its history."""

    number: int = 0
    ancestry: Ancestry = ()

    def has_in_history(self, other: TrainingLine, step: int) -> bool:
        """Return whether `step` of the line `other`, which may be this one, is part of the history of this line."""
        return other.number == self.number or step <= dict(self.ancestry).get(other.number, -1)

    def has_abandoned(self, other: TrainingLine, step: int) -> bool:
        """Return whether a roll-back abandoned `step` of `other` when it opened this line or an ancestor of it."""
        return other.number in dict(self.ancestry) and not self.has_in_history(other, step)

    def after_rollback(self, number: int, to: TrainingLine, step: int) -> TrainingLine:
        """Return the new line that a roll-back to `step` of the line `to` opens; this line is the newest so far.

        number: that of the new line.
        """
        left = dict.fromkeys((*dict(self.ancestry), self.number), -1)
        return TrainingLine(number, tuple(sorted({**left, **dict(to.ancestry), to.number: step}.items())))

    def after_lower_step(self, number: int, below: int) -> TrainingLine:
        """Return the new line that opens where this one continues with a step number that is not above its last.

        number: that of the new line. below: the new step; steps of this line from this number on are abandoned.
        """
        left = {**dict(self.ancestry), self.number: below - 1}
        return TrainingLine(number, tuple(sorted((older, min(last, below - 1)) for older, last in left.items())))


def parse_line(number: int, left: Ancestry) -> TrainingLine:
    """Return the line from the fields `line` and `left` of a record; raise ValueError if they are invalid."""
    found = TrainingLine(number, tuple((older, last) for older, last in left))
    for older, last in ((number, -1), *found.ancestry):
        if type(older) is not int or type(last) is not int or not 0 <= older <= number or last < -1:
            raise ValueError(f"training line {number!r} can't come after {left!r}")
    return found


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The steps of a repository in the order in which they were saved."""

    steps: tuple[int, ...]
    """All steps: first those outside of the newest step's history, then the history. The last one is the newest step."""
    newest_line: TrainingLine
    """The line of the newest step."""
    abandoned: frozenset[int] = frozenset()
    """Steps that a roll-back has abandoned."""
    set_aside: frozenset[int] = frozenset()
    """Steps of other runs, whose lines the newest line does not mention."""

    def history(self) -> tuple[int, ...]:
        """Return the history of the newest step, oldest first, with the newest step as the last."""
        return tuple(step for step in self.steps if step not in self.abandoned and step not in self.set_aside)

    def newest_first(self, restore_step_limit: int | None = None) -> list[int]:
        """Return all steps in the order in which a load tries them.

        restore_step_limit: if given, steps of the history below this number precede all others.
        """
        live = self.history()
        others = self.steps[: len(self.steps) - len(live)]
        below = [step for step in live if restore_step_limit is None or step < restore_step_limit]
        above = [step for step in live if restore_step_limit is not None and step >= restore_step_limit]
        return [*reversed(below), *reversed(above), *reversed(others)]


def order_steps(
    lines: Mapping[int, TrainingLine], unknown: Collection[int] = (), opened: TrainingLine | None = None
) -> StepOrder:
    """Return the order of the steps of a repository.

    lines: the line of each step.
    unknown: steps whose records could not be read. They are ordered by number on the newest line, so that a load still tries
        them and reports their damage.
    opened: the newest line that was opened, if it is known. No step of `lines` may be on it; then the unknown ones count as its
        steps, because one of them may be the newest.
    """
    newest = max(((line.number, step, line) for step, line in lines.items()), key=lambda found: found[:2], default=None)
    line = TrainingLine() if newest is None else newest[2]
    if unknown and opened is not None and opened.number > line.number:
        line = opened
    found = {**dict.fromkeys(unknown, line), **lines}
    others = {step for step, its in found.items() if not line.has_in_history(its, step)}
    abandoned = frozenset(step for step in others if line.has_abandoned(found[step], step))
    return StepOrder(
        tuple(sorted(found, key=lambda step: (step not in others, found[step].number, step))),
        line, abandoned, frozenset(others - abandoned),
    )  # fmt: skip


def order_by_number(steps: Iterable[int]) -> StepOrder:
    """Return the order of steps that are all on the first line."""
    return StepOrder(tuple(sorted(steps)), TrainingLine())
