"""What the time of a run is spent on, as the agent that leads it sees it. Each begins where the one before it has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from ckpt.recovery.agents import LOST_SECONDS, Report
from ckpt.recovery.coordinator import Coordinator
from ckpt.recovery.course import Course
from ckpt.recovery.ledger import FILE, Ledger, Name, file_of, lines_in
from ckpt.recovery.state import Entry


class Accounts:
    """Of one agent: it accounts from when it leads until it learns that another does.

    name: of its host. alone: there is no other. log: of the run; it grows. coordinator: has heard of the other agents.
    """

    def __init__(self, folder: Path, name: str, alone: bool, log: Sequence[Entry], coordinator: Coordinator) -> None:
        self._folder, self._name, self._alone, self._log, self._coordinator = folder, name, alone, log, coordinator
        self._ledger: Ledger | None = None

    def turn(self, course: Course, mine: Report) -> None:
        """The time since the last call, by what the agents have said."""
        if not self._leads(course):
            return
        last, spec = course.last, course.spec
        assert last is not None
        assert spec is not None
        if last.kind not in ("start", "stop"):
            for_hosts = spec.hosts > 1 or last.facts.get("wait", 0) > 0
            self.spent(course, "wait" if for_hosts else "spawn" if last.kind == "run" else "decide")
            return
        living = self._coordinator.reports()
        here = [report for report in living.values() if report.attempt == course.attempt]
        first = living.get(course.members[0].name, mine)
        step, committed = min((r.step for r in here), default=-1), max((r.committed for r in here), default=-1)
        waits = last.kind == "start" and any(report.wrong is not None for report in here)  # until all have been heard
        self.spent(course, "detect" if waits else first.spent if first in here else "spawn", step, committed)
        late = [report.wrong.silent_seconds for report in here if report.wrong is not None]
        silent = [self._coordinator.silent_seconds(member.name) for member in course.members]
        late += [seconds for seconds in silent if seconds > LOST_SECONDS]
        if late and self._ledger is not None:
            self._ledger.instead("detect", max(late))

    def spent(self, course: Course, name: Name, step: int = -1, committed: int = -1) -> None:
        """The time since the last call was spent on this."""
        if not self._leads(course):
            return
        if self._ledger is None:
            self._ledger = Ledger(self._folder / (FILE if self._alone else file_of(self._name)), self._begin())
        self._ledger.now(name, max(0, course.attempt), step, committed)

    def close(self, course: Course) -> None:
        if self._leads(course):
            self._close(over=True)

    def _leads(self, course: Course) -> bool:
        if course.leader == self._name:
            return True
        self._close(over=False)
        return False

    def _close(self, over: bool) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close(over)

    def _begin(self) -> float | None:
        """By CLOCK_MONOTONIC; None: with this process, which has begun the run."""
        if self._alone:
            return None
        leads = [entry for entry in takewhile(lambda entry: entry.kind != "run", reversed(self._log)) if entry.kind == "lead"]
        leaders = [entry.facts["name"] for entry in leads]
        ledgers = {name: lines_in(self._folder / file_of(name)) for name in set(leaders)}
        until = {name: lines[-1].at for name, lines in ledgers.items() if lines and lines[-1].at >= leads[-1].at}
        now = time.monotonic()
        shared = bool(until.keys() - {self._name})  # by the hosts: their ledgers are here, too
        if shared or until.get(self._name, 0.0) >= leads[0].at:  # this agent, started again
            return min(now, now - (time.time() - max(until.values())))
        return now - self._coordinator.silent_seconds(leaders[1]) if len(leads) > 1 else None
