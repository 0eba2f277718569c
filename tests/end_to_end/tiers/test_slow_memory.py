"""Ranks that restore wait for the memory of a host that is slow, as long as ckpt-run says that it is worth."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import until

import ckpt
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes, NodeSecurity
from ckpt.repository.repository import open_repository
from ckpt.tiers import tier_spec


def test_memory_that_stands_still_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_spec, "_ANSWER_SECONDS", 0.5)
    keeper = MemoryNodes(tmp_path / "memory", "127.0.0.1", NodeSecurity())
    try:
        until(lambda: (keeper.update(()), keeper.state == "ready")[1])
        record = open_repository(tmp_path / "repo")
        memory = f"ckpt://{keeper.fresh}?redundancy=1x"
        monkeypatch.setenv(tier_spec.MEMORY_VARIABLE, memory)
        with ckpt.Checkpointer(record.url, every=None, tiers=[ckpt.Tier("memory", every=1)], group=None) as ck:
            ck.step(0, {"w": np.arange(50_000.0)})
            ck.wait()
            monkeypatch.setenv(tier_spec.PREVIOUS_MEMORY_VARIABLE, memory)
            assert keeper._process is not None
            os.kill(keeper._process.pid, signal.SIGSTOP)
            try:
                assert tier_spec.previous_memories(record) == [], "ckpt-run has not said that anything is worth waiting"
                monkeypatch.setenv(tier_spec.MEMORY_WAIT_VARIABLE, f"60 {memory}")
                found: list[list[ckpt.Repository]] = []
                asks = threading.Thread(target=lambda: found.append(tier_spec.previous_memories(record)))
                asks.start()
                time.sleep(2.0)
                assert asks.is_alive()
            finally:
                os.kill(keeper._process.pid, signal.SIGCONT)
            asks.join()
            assert [repo.steps() for repo in found[0]] == [[0]]
    finally:
        keeper.close(remove=True)
    monkeypatch.setenv(tier_spec.MEMORY_WAIT_VARIABLE, "x")
    with pytest.raises(ckpt.InvalidArgument, match="SECONDS URL"):
        tier_spec.previous_memories(record)
