"""A read-only member of a namespace: it takes no writes, and does not count as down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nodes import LocalNode

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes


def opened(nodes: list[LocalNode]) -> Namespace:
    members = [{"url": node.address, "name": f"n{i}"} for i, node in enumerate(nodes)]
    return Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    """A namespace of four nodes, of which n0 became read-only after a file was written."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(4)]
    first = opened(nodes)
    first.put("before", random_bytes(100_000, 1))
    first.close()
    nodes[0].close()
    nodes[0] = LocalNode(tmp_path / "n0", NodeOptions(read_only=True))
    made = opened(nodes)
    yield made
    made.close()
    for node in nodes:
        node.close()


def test_a_read_only_member_is_not_down_after_writes(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """All writes succeed with full redundancy on the other members, and the reads of the client still use it."""
    files = {f"f{i}": random_bytes(100_000, i) for i in range(8)} | {"small": b"1"}
    for path, data in files.items():
        namespace.put(path, data)
        assert not namespace.fan_out.health.is_down("n0")
    assert caplog.text.count("written without n0") == 1, "not one warning for each file"
    assert "gets no calls" not in caplog.text
    assert namespace.delete(["f0"]) == ["f0"]
    del files["f0"]
    assert {path: namespace.get(path) for path in files} == files
    assert namespace.get("before") == random_bytes(100_000, 1)
    assert not scrub.scrub_namespace(namespace, verify=True).damaged_files
    assert not namespace.fan_out.health.is_down("n0")


@pytest.mark.slow
def test_a_repair_does_not_count_a_read_only_member_as_down(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """The lost fragments go to the other members."""
    files = {f"f{i}": random_bytes(100_000, i) for i in range(12)}
    for path, data in files.items():
        namespace.put(path, data)
    open_member = namespace.open_members["n1"]
    open_member.store.delete(list(open_member.inventory()))
    done = repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
    assert "n0 takes no more rebuilt fragments" in caplog.text
    assert not namespace.fan_out.health.is_down("n0")
    assert "gets no calls" not in caplog.text
    assert done.files
    found = scrub.scrub_namespace(namespace, verify=True)
    assert {each.path for each in found.damaged_files} == set(done.failed)
    second = repair.repair_namespace(namespace, found)
    assert {path: namespace.get(path) for path in files} == files
    assert not second.failed
