"""The metrics page of an agent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.recovery.agent.agent import Agent
from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.goodput.ledger import LEDGER_FILE, GoodputLedger
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.sqlite import SqliteRunLog


def test_other_metrics_are_served_while_a_ledger_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / LEDGER_FILE
    path.mkdir()
    ranks: Any = SimpleNamespace(heartbeats={})
    with closing(SqliteRunLog(tmp_path)) as run_log:
        agent = Agent(RunSpec(("train",), 1, 1, 1), HostOptions("a", tmp_path), run_log, print)
        for _ in range(2):
            page = agent._render_metrics(ranks)
            assert "ckpt_run_up{} 1" in page or "ckpt_run_up 1" in page
            assert "ckpt_run_goodput_ratio" not in page
        assert caplog.text.count(f"{path} can't be read: Is a directory") == 1
        path.rmdir()
        ledger = GoodputLedger(path, None)
        ledger.account("useful", 0, 1, 1)
        ledger.close(True)
        assert "ckpt_run_goodput_ratio" in agent._render_metrics(ranks)
