"""The waits of a coordinator do not pass while its process, and mostly the whole job, is suspended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from helpers.agent_worlds import agent

from ckpt.recovery.coordinator import coordinator
from ckpt.recovery.coordinator.coordinator import Coordinator
from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.recovery.run_log.sqlite import SqliteRunLog


def test_no_wait_passes_while_the_job_is_suspended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    views: list[DecisionInput] = []
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(coordinator, "draft_next_entries", lambda view: views.append(view) or [])
    with contextlib.closing(SqliteRunLog(tmp_path)) as run_log:
        run = entry_drafts.draft_run(0, "r", RunSpec(("true",), ranks=1, hosts=1))
        assert run_log.append(0, [run, Draft(0, "lead", "", {"name": "a"})])
        run_state = RunState().apply_entries(run_log.entries())
        coordinating = Coordinator(run_log, single_host=True)
        for seconds in (0.0, *[0.5] * 10, 3600.0, 0.5):
            clock[0] += seconds
            coordinating.coordinate(run_state, agent("a"))
    assert [view.waited_seconds for view in views[-3:]] == [5.0, 6.0, 6.5]
    assert views[-1].ran_seconds == 6.5
