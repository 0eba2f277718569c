"""Ranks that restore wait for the memory of a host that is slow, as long as ckpt-run says that it is worth."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_run_memory import until

import ckpt
from ckpt import tier
from ckpt.recovery.keeper import Guard, Keeper
from ckpt.repository import open_repository


def test_memory_that_stands_still_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "_ANSWER_SECONDS", 0.5)
    keeper = Keeper(tmp_path / "memory", "127.0.0.1", Guard())
    try:
        until(lambda: (keeper.look(()), keeper.state == "ready")[1])
        record = open_repository(tmp_path / "repo")
        memory = f"ckpt://{keeper.fresh}?redundancy=1x"
        monkeypatch.setenv(tier.VARIABLE, memory)
        with ckpt.Checkpointer(record.url, every=None, tiers=[ckpt.Tier("memory", every=1)], group=None) as ck:
            ck.step(0, {"w": np.arange(50_000.0)})
            ck.wait()
            monkeypatch.setenv(tier.BEFORE, memory)
            assert keeper._process is not None
            os.kill(keeper._process.pid, signal.SIGSTOP)
            try:
                assert tier.kept_before(record) == [], "ckpt-run has not said that anything is worth waiting"
                monkeypatch.setenv(tier.WAIT, f"60 {memory}")
                found: list[list[ckpt.Repository]] = []
                asks = threading.Thread(target=lambda: found.append(tier.kept_before(record)))
                asks.start()
                time.sleep(2.0)
                assert asks.is_alive()
            finally:
                os.kill(keeper._process.pid, signal.SIGCONT)
            asks.join()
            assert [repo.steps() for repo in found[0]] == [[0]]
    finally:
        keeper.close(free=True)
    monkeypatch.setenv(tier.WAIT, "x")
    with pytest.raises(ckpt.InvalidArgument, match="SECONDS URL"):
        tier.kept_before(record)
