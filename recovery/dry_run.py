"""What would be decided if something went wrong now: the same functions that decide, on what is supposed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt.recovery.advance import View, advance
from ckpt.recovery.agents import Report, Wrong
from ckpt.recovery.course import Course
from ckpt.recovery.state import Draft, Entry


def suppose(entries: Sequence[Entry], reports: Mapping[str, Report], lost: Sequence[str], killed: int | None) -> list[Draft]:
    """The entries that would follow, up to the next attempt.

    lost: hosts that are no more. killed: a rank that is killed.
    """
    course = Course().went_on(entries)
    there = {name: report for name, report in reports.items() if name not in lost}
    for member in course.members:
        if killed is not None and member.first <= killed < member.first + member.count and member.name in there:
            there[member.name] = replace(there[member.name], wrong=Wrong("signal", (killed,), "was killed by SIGKILL"))
    found: list[Draft] = []
    waited = 0.0
    for _ in range(8):
        drafts = advance(View(course, there, there, waited))
        number = course.number
        course = course.went_on(
            [Entry(number + 1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
        )
        found += drafts
        if course.over or (drafts and drafts[-1].kind == "start"):
            return found
        idle = {name: replace(r, doing="idle", wrong=None) for name, r in there.items()}
        there, waited = idle, (0.0 if drafts else 1e9)  # all that is waited for comes to nothing
    return found
