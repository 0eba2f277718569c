"""A host that leaves a run frees its memory only if the run log answers."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.agent_worlds import agent

from ckpt.recovery.agent import agent_loop, followed_log
from ckpt.recovery.agent.followed_log import FollowedLog
from ckpt.recovery.run_log.base import LogEntry
from ckpt.recovery.run_log.entry_drafts import AttemptStart, draft_run, draft_start
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import Unavailable

SPEC = RunSpec(("train",), 1, 2, 2)


class _LogThatStops(SqliteRunLog):
    """The log of a run, which answers until `has_stopped`."""

    has_stopped = False

    def entries(self, after: int = 0) -> list[LogEntry]:
        if self.has_stopped:
            raise Unavailable("the run log does not answer")
        return super().entries(after)


def _loop(run_log: _LogThatStops) -> agent_loop.AgentLoop:
    """Return the loop of an agent c that a signal has asked to leave the attempt of a and b."""
    members = [AttemptHost(name, name, i, 1) for i, name in enumerate("ab")]
    start = draft_start(AttemptStart(0, members, agent("a"), {}, []), "2 ranks", ["train"])
    assert run_log.append(0, [draft_run(0, "run", SPEC), start])
    log = FollowedLog(run_log)
    log.read()

    def nothing(*_: object) -> None: ...

    parts: Any = SimpleNamespace(
        identity=SimpleNamespace(name="c", incarnation="c", report=lambda _: agent("c")),
        spec=SPEC,
        run_id="run",
        signals=SimpleNamespace(first=signal.SIGTERM, first_at=time.monotonic() - 1e6, count=1),
        select=SimpleNamespace(select=lambda seconds: []),
        messages=SimpleNamespace(print_entry=nothing, print_log_error=nothing, forget_log_error=nothing, print=nothing),
        log=log,
        ranks=SimpleNamespace(
            are_started=False, have_ended=False, failure=None, attempt=-1, poll=nothing, add_to_report=lambda report: report
        ),
        memory=SimpleNamespace(update=nothing, add_to_report=lambda report: report, is_needed=lambda run_state, reports: False),
        coordinator=SimpleNamespace(coordinate=lambda run_state, report: False, reports=dict),
        accounting=SimpleNamespace(account=nothing, account_by_reports=nothing),
        lease=SimpleNamespace(set_reports=nothing, take_loss=nothing),
        heartbeat=SimpleNamespace(set_report=nothing),
    )
    return agent_loop.AgentLoop(parts)


@pytest.mark.parametrize("has_stopped", [False, True])
def test_memory_is_freed_only_while_the_run_log_answers(tmp_path: Path, has_stopped: bool) -> None:
    """Without answers it is not known whether another host with the other copies has gone meanwhile."""
    with closing(_LogThatStops(tmp_path)) as run_log:
        loop = _loop(run_log)
        run_log.has_stopped = has_stopped
        time.sleep(2 * followed_log._READ_SECONDS)  # so that the loop reads the log again
        assert loop.run() == 128 + signal.SIGTERM
        assert loop.can_free_memory() == (not has_stopped)
