"""A node dies and is forgotten while a client publishes a file: the client completes at every point of that change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.collections_of_tombstones import count_collected
from helpers.nodes import LocalNode, NodeProcess, nodes_config
from helpers.stopped_client import StoppedClient
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.records.eras import begin_era
from ckpt.storage.testing import random_bytes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    started = [NodeProcess(tmp_path / f"n{i}") for i in range(4)]
    try:
        yield started
    finally:
        for node in started:
            node.close()


def url_of(nodes: list[NodeProcess]) -> str:
    return "ckpt://" + ",".join(node.address for node in nodes)


def path_ordered_by(namespace: Namespace, node: NodeProcess) -> str:
    """Return a path whose replica set has this node as its first member, which orders its records."""
    names = (f"f{i}" for i in range(1000))
    return next(name for name in names if namespace.ring.replica_set(f"/{name}").members[0] == node.address)


@pytest.mark.parametrize("nbytes", [1_000, 1 << 20])
@pytest.mark.parametrize(
    ("collected", "point"),
    [
        pytest.param(False, "register.changed", id="no record was collected before"),
        pytest.param(True, "register.accept", id="records were collected before"),
    ],
)
def test_a_write_completes_after_the_only_member_with_its_record_is_forgotten(
    nodes: list[NodeProcess], nbytes: int, collected: bool, point: str
) -> None:
    """The first member of the path may have the record, and dies. The others refuse the record, so no remaining member has
    it."""
    namespace, _ = open_namespace(url_of(nodes))
    namespace.put("a", b"1")
    if collected:
        namespace.delete(["a"])
        assert count_collected(namespace, 1) == 1
    path = path_ordered_by(namespace, nodes[2])
    writer = StoppedClient(url_of(nodes), f"namespace.put({path!r}, random_bytes({nbytes}, 2))", point)
    try:
        nodes[2].kill()
        rest, _ = open_namespace(url_of(nodes))
        assert not rebalance.remove_member(rest, nodes[2].address).failed
        outcome = writer.finish()
    finally:
        writer.close()
    assert outcome.startswith("acknowledged"), outcome
    remaining, _ = open_namespace(url_of([nodes[0], nodes[1], nodes[3]]))
    assert remaining.get(path) == random_bytes(nbytes, 2)
    require_whole(remaining, verify=True)


@pytest.mark.parametrize("collects", [False, True], ids=["nothing", "another file"])
def test_a_write_completes_although_a_new_era_begins(nodes: list[NodeProcess], collects: bool) -> None:
    """The members refuse the record by its old era, and none has it: the client writes it again with the new era."""
    namespace, _ = open_namespace(url_of(nodes))
    namespace.put("a", b"1")
    assert begin_era(namespace) is not None
    if collects:
        namespace.delete(["a"])
    writer = StoppedClient(url_of(nodes), "namespace.put('b', random_bytes(1 << 20, 2))", "register.accept")
    try:
        assert count_collected(namespace, 1) == 1 if collects else begin_era(namespace) is not None
        outcome = writer.finish()
    finally:
        writer.close()
    assert outcome.startswith("acknowledged"), outcome
    assert namespace.get("b") == random_bytes(1 << 20, 2)


def test_a_file_is_moved_by_its_writer_and_by_an_admin_at_the_same_time(tmp_path: Path) -> None:
    """A partly written record is on a forgotten node. The client that forgets the node and the writer move the file at the same
    time."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(4)]
    writer, admin = (Namespace(nodes_config(nodes, redundancy="1x")) for _ in range(2))
    try:
        file = writer.put("f", random_bytes(1 << 20, 2))
        assert file.layout is not None
        member = file.layout.objects[0].member
        assert not rebalance.remove_member(admin, member).failed  # the only copy in the record of the writer is gone
        writer.invalidate_ring()
        writer._publisher._move_off_members("f", file, {member})
        assert writer.get("f") == random_bytes(1 << 20, 2)
    finally:
        for each in (writer, admin, *nodes):
            each.close()
