"""All agents of a run are killed and started again before a leader has read what the killed ones reported."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.agent_worlds import World, agent, world

from ckpt.recovery.agent import joining
from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.agent.joining import Joining, JoinRequest
from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.ranks.signals import Signals
from ckpt.recovery.run_log.agent_reports import decode_reports
from ckpt.recovery.run_log.base import Draft, RunLog
from ckpt.recovery.run_log.sqlite import SqliteRunLog


def start_again(run: World, run_log: RunLog, start: int) -> None:
    """Let new agents take the names of all agents. start: how often they were started."""
    for name in run.agents:
        report = replace(agent(name), incarnation=f"{name}-{start}")
        request = JoinRequest(name, run.spec, False, None, partial(replace, report))
        assert Joining(FollowedLog(run_log), request, Signals(), print).join().run_id == "r"


@pytest.mark.parametrize("starts", [1, 2])
def test_steps_that_killed_agents_reported_stay_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int) -> None:
    """Without them, memory that has these steps would not be awaited, and be released too early."""
    monkeypatch.setattr(joining, "LOST_SECONDS", 0.0)
    run = world(hosts=2, least=2, agents=2)
    run.advance()
    last = {"committed": 14, "line": 1, "restored": 3, "durable": 9, "step_seconds": 2.5}
    with closing(SqliteRunLog(tmp_path)) as run_log:
        run_log.append(0, [Draft(entry.attempt, entry.kind, entry.text, entry.facts) for entry in run.log])
        for name, report in run.agents.items():
            run_log.publish_report(name, replace(report, **last).to_facts())  # type: ignore[arg-type]
        for start in range(starts):
            start_again(run, run_log, start + 2)
        run.agents = decode_reports(run_log.reports())
    failure, decision = draft_next_entries(run.view())
    assert failure.facts["cause"] == "lost"
    assert {name: failure.facts[name] for name in last} == last
    assert decision.facts["action"] == "restart"
    run.advance()
    assert run.run_state.newest.step == 14
