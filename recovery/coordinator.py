"""Moves a run on: writes the next entries of its log. Each agent has one, and one of them leads.

The first that came leads; when it is lost, the next. Who takes the lead writes so into the log, and so who led before, should
it still live, learns of it: its own entries would come too late.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ckpt.recovery.advance import View, advance
from ckpt.recovery.agents import Report, Roll, readable
from ckpt.recovery.course import Course
from ckpt.recovery.state import Draft, State
from ckpt.storage.failpoints import failpoint

_LISTEN_SECONDS = 0.1
"""How often the leader asks what the agents say."""

_GLANCE_SECONDS = 0.5
"""How often the others do."""


class Coordinator:
    """One agent's part in deciding."""

    def __init__(self, state: State, alone: bool) -> None:
        self._state = state
        self._alone = alone
        self._roll = Roll()
        self._listened = 0.0
        self._told: dict[str, Report] = {}
        self._entry: tuple[str, int] | None = None
        self._entry_at = time.monotonic()
        self._began_at = time.monotonic()
        self._wrong_at: float | None = None

    def turn(self, course: Course, mine: Report) -> bool:
        """Do what there is to be done now; whether something was. Raises Unavailable where the state does not answer."""
        now = time.monotonic()
        self._note(course, now)
        view = self._view(course, mine, now)
        if course.leader != mine.name:
            return self._takes_the_lead(course, view, mine)
        drafts = advance(view)
        if not drafts:
            return False
        failpoint(f"coordinator.{drafts[0].kind}")
        written = self._state.append(course.number, drafts)
        failpoint(f"coordinator.{drafts[0].kind}.written")
        return written

    def reports(self) -> dict[str, Report]:
        """Of all agents that live, as heard last."""
        return self._told

    def silent_seconds(self, name: str) -> float:
        """How long an agent has said nothing; 0 where nothing is known of it."""
        return self._roll.silent_seconds(name)

    def _note(self, course: Course, now: float) -> None:
        """When the entries came, by the clock of this host: of several of one kind, the first."""
        last = course.last
        entry = None if last is None else (last.kind, last.attempt)
        if entry != self._entry:
            self._entry, self._entry_at = entry, now
            if entry is not None and entry[0] == "start":
                self._began_at = now

    def _view(self, course: Course, mine: Report, now: float) -> View:
        leads = course.leader == mine.name
        if not self._alone and now - self._listened >= (_LISTEN_SECONDS if leads else _GLANCE_SECONDS):
            self._listened = now
            told = {name: said for name, said in readable(self._state.reports()).items() if name != mine.name}
            self._roll.hear(told, time.monotonic())
        me = {mine.name: mine}
        self._told = self._roll.living() | me
        perhaps = self._roll.perhaps() | me
        return View(
            course,
            self._told,
            perhaps,
            now - self._entry_at,
            now - self._began_at,
            self._roll.silent(),
            self._unheard(course, perhaps, now),
        )

    def _unheard(self, course: Course, perhaps: Mapping[str, Report], now: float) -> frozenset[str]:
        """Who has said nothing since something was wrong; what is heard in the next round may have been said before."""
        if not any(r.wrong is not None and r.attempt == course.attempt for r in perhaps.values()):
            self._wrong_at = None
            return frozenset()
        if self._wrong_at is None:
            self._wrong_at = now
        return self._roll.unheard(self._wrong_at + _LISTEN_SECONDS)

    def _takes_the_lead(self, course: Course, view: View, mine: Report) -> bool:
        if course.leader in view.perhaps or mine.leaving:
            return False
        heirs = {name: r for name, r in view.perhaps.items() if not r.leaving}
        if min(heirs.values(), key=lambda r: (r.joined, r.name)).name != mine.name:
            return False
        failpoint("coordinator.lead")
        text = f"{mine.name} coordinates from now on" + (f", as {course.leader} is gone" if course.leader else "")
        written = self._state.append(course.number, [Draft(max(0, course.attempt), "lead", text, {"name": mine.name})])
        failpoint("coordinator.lead.written")
        return written
