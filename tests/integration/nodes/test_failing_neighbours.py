"""A node process of this host fails at its fail points: the client uses the network, or gets an error."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from pathlib import Path

import pytest
from helpers.node_fixtures import DATA, open_objects
from helpers.node_fixtures import local_node as local_node
from helpers.node_fixtures import node as node
from helpers.nodes import NodeProcess, nodes_config, quick

from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.storage.testing import random_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets of abstract names are Linux's")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_file_moves_on_when_a_node_fails_after_its_object_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file goes to other members; this process does not keep the begun object open."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(3)]
    namespace = quick(nodes_config(nodes, redundancy="2x", deadline_seconds=2.0))
    begin, failed = FileWriter._open_object, threading.Lock()

    def begun(self: FileWriter, member: str) -> int:
        found = begin(self, member)
        if failed.acquire(blocking=False):
            next(n for n in nodes if n.address == member).signal(number)
        return found

    try:
        namespace.put("first", b"all are there once")
        monkeypatch.setattr(FileWriter, "_open_object", begun)
        gc.disable()
        data = random_bytes(2_000_001, 1)
        namespace.put("a", data)
        assert failed.locked()
        assert namespace.get("a") == data
        namespace.close()
        assert not open_objects()
    finally:
        gc.enable()
        namespace.close()
        for node in nodes:
            node.close()


@pytest.mark.parametrize("point", ["node.append=kill@1", "node.get=error@*"])
def test_other_members_replace_a_node_that_fails_at_a_call(tmp_path: Path, point: str) -> None:
    """The namespace has enough other members."""
    nodes = [NodeProcess(tmp_path / f"n{i}", failpoints=point if i == 0 else "") for i in range(3)]
    namespace = quick(nodes_config(nodes, redundancy="2x"))
    try:
        namespace.put("first", b"all are there once")
        for i in range(4):
            namespace.put(f"f{i}", DATA)
        for i in range(4):
            assert namespace.get(f"f{i}") == DATA
    finally:
        namespace.close()
        for node in nodes:
            node.close()
