"""Ranks that restore wait for the memory of a slow host for as long as ckpt-run allows."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import stop, until

import ckpt
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes
from ckpt.repository.repository import open_repository
from ckpt.storage.node.security_options import NodeSecurity
from ckpt.tiers import memory_folder, previous_memory


def test_a_restore_waits_for_stopped_memory_as_long_as_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previous_memory, "_ANSWER_SECONDS", 0.5)
    nodes = MemoryNodes(tmp_path / "memory", "127.0.0.1", NodeSecurity())
    try:
        until(lambda: (nodes.update(()), nodes.state == "ready")[1])
        record = open_repository(tmp_path / "repo")
        memory = f"ckpt://{nodes.fresh}?redundancy=1x"
        monkeypatch.setenv(memory_folder.MEMORY_VARIABLE, memory)
        with ckpt.Checkpointer(record.url, every=None, tiers=[ckpt.Tier("memory", every=1)], group=None) as ck:
            ck.step(0, {"w": np.arange(50_000.0)})
            ck.wait()
            monkeypatch.setenv(memory_folder.PREVIOUS_MEMORY_VARIABLE, memory)
            assert nodes._process is not None
            stop(nodes._process.pid)
            try:
                assert previous_memory.previous_memories(record) == [], "ckpt-run has not allowed any wait"
                monkeypatch.setenv(memory_folder.MEMORY_WAIT_VARIABLE, f"60 {memory}")
                found: list[list[ckpt.Repository]] = []
                reader = threading.Thread(target=lambda: found.append(previous_memory.previous_memories(record)))
                reader.start()
                time.sleep(2.0)
                assert reader.is_alive()
            finally:
                os.kill(nodes._process.pid, signal.SIGCONT)
            reader.join()
            assert [repo.steps() for repo in found[0]] == [[0]]
    finally:
        nodes.close()
        nodes.remove()
    monkeypatch.setenv(memory_folder.MEMORY_WAIT_VARIABLE, "x")
    with pytest.raises(ckpt.InvalidArgument, match="SECONDS URL"):
        previous_memory.previous_memories(record)
