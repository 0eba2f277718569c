"""A node is forgotten while a client writes."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from helpers.nodes import LocalNode, nodes_config
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.storage.testing import random_bytes


@pytest.mark.parametrize("redundancy", ["1x", "2x"])
def test_no_acknowledged_file_is_only_on_a_forgotten_live_node(tmp_path: Path, redundancy: str) -> None:
    """The configuration of the writer still names the node; afterwards the node can be thrown away."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(4)]
    table = {"redundancy": redundancy, "deadline_seconds": 60.0}  # a busy machine may be slow
    writer = Namespace(nodes_config(nodes, **table))
    acknowledged: list[int] = []
    writes_done = threading.Event()

    def write() -> None:
        number = 0
        while not writes_done.is_set():
            writer.put(f"f{number}", random_bytes(50_000, number))
            acknowledged.append(number)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while len(acknowledged) < 20:
            assert thread.is_alive()
            time.sleep(0.01)
        admin = Namespace(nodes_config(nodes, **table))
        done = rebalance.remove_member(admin, nodes[2].address)
        assert not done.failed
        acknowledged_before = len(acknowledged)
        while len(acknowledged) < acknowledged_before + 20:
            assert thread.is_alive(), "a write failed"
            time.sleep(0.01)
    finally:
        writes_done.set()
        thread.join()
    nodes[2].close()
    shutil.rmtree(tmp_path / "n2")
    rest = Namespace(nodes_config([nodes[i] for i in (0, 1, 3)], **table))
    for number in acknowledged:
        assert rest.get(f"f{number}") == random_bytes(50_000, number)
    require_whole(rest, verify=True)
    for each in (writer, admin, rest, *(nodes[i] for i in (0, 1, 3))):
        each.close()
