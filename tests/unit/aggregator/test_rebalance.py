"""Members are drained, and files are spread over new members."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from helpers.damaged_namespaces import assert_whole, content, damage_record, filled_namespace
from helpers.nodes import LocalNode, directories
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+2"])
def test_a_drained_member_has_no_objects(tmp_path: Path, redundancy: str) -> None:
    """All objects move to other members, also those of files with one copy; then the disk may be removed."""
    namespace = filled_namespace(tmp_path, redundancy, 7)
    assert not rebalance.drain_member(namespace, "disk1").failed
    assert not namespace.open_members["disk1"].inventory()
    assert_whole(namespace, redundancy)
    with pytest.raises(InvalidArgument, match="disk9 is not a member"):
        rebalance.drain_member(namespace, "disk9")
    namespace.close()


@pytest.mark.slow
def test_a_read_only_member_is_removed_but_not_drained(tmp_path: Path) -> None:
    """It can't delete its objects. It can be removed permanently, and nothing is lost."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(4)]

    def opened() -> Namespace:
        members = [{"url": node.address, "name": f"n{i}"} for i, node in enumerate(nodes)]
        return Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))

    with closing(opened()) as namespace:
        for path, data in content().items():
            namespace.put(path, data)
    nodes[0].close()
    nodes[0] = LocalNode(tmp_path / "n0", NodeOptions(read_only=True))
    with closing(opened()) as namespace:
        with pytest.raises(InvalidArgument, match="n0 is read-only, so it can't delete the fragments that move"):
            rebalance.drain_member(namespace, "n0")
        assert not rebalance.remove_member(namespace, "n0").failed
        require_whole(namespace, verify=True)
    for node in nodes:
        node.close()


def test_rebalancing_moves_only_the_parts_of_new_members(tmp_path: Path) -> None:
    """Two members join: they get their share, and nothing else moves."""
    namespace = Namespace(directories(tmp_path, 4))
    for i in range(40):
        namespace.put(f"f{i}", random_bytes(40_000, i))
    namespace.close()
    grown = Namespace(directories(tmp_path, 6))
    done = rebalance.rebalance_fragments(grown)
    assert not done.failed
    objects_on = {name: len(member.inventory()) for name, member in grown.open_members.items()}
    assert sum(objects_on.values()) == 80
    assert min(objects_on["disk4"], objects_on["disk5"]) > 4
    assert done.nbytes <= 40_000 * (objects_on["disk4"] + objects_on["disk5"]), "only the objects of the new members move"
    for i in range(40):
        assert grown.get(f"f{i}") == random_bytes(40_000, i)
    assert not rebalance.rebalance_fragments(grown).files
    require_whole(grown, verify=True)
    grown.close()


def test_a_second_rebalancing_moves_nothing_whichever_host_it_runs_on(tmp_path: Path) -> None:
    """The first copy of a file is written near its writer; where the copies move does not depend on who moves them."""

    def opened(host: int) -> Namespace:
        members = [{"url": str(tmp_path / f"disk{i}"), "name": f"disk{i}", "domain": f"host{i}"} for i in range(4)]
        return Namespace(config_from_table("test", {"members": members, "redundancy": "2x", "near": f"host{host}"}, "the test"))

    for i in range(20):
        with closing(opened(i % 4)) as namespace:
            namespace.put(f"f{i}", random_bytes(40_000, i))
    with closing(opened(0)) as namespace:
        assert rebalance.rebalance_fragments(namespace).files
    for host in range(4):
        with closing(opened(host)) as namespace:
            done = rebalance.rebalance_fragments(namespace)
            assert (done.files, dict(done.failed)) == (0, {})
    with closing(opened(0)) as namespace:
        require_whole(namespace, verify=True)
        for i in range(20):
            assert namespace.get(f"f{i}") == random_bytes(40_000, i)


@pytest.mark.parametrize("change", ["rebalance", "forget", "forget a lost one"])
def test_a_record_without_a_quorum_stops_no_change_of_the_members(tmp_path: Path, change: str) -> None:
    """The other records and files move, the report names this record, and no member drops what is left of it."""
    namespace = filled_namespace(tmp_path, "2x", 4)
    replicas = namespace.ring.replica_set("/d/f1").members
    for member in replicas[:2]:
        damage_record(tmp_path / member, "d/f1")
    namespace.close()
    namespace = Namespace(directories(tmp_path, 6, deadline_seconds=2.0))
    removed = replicas[2]
    if change == "forget a lost one":
        (tmp_path / removed / "objects").rename(tmp_path / "lost")
        namespace.open_members[removed].info = refuse  # type: ignore[method-assign]
    done = rebalance.rebalance_fragments(namespace) if change == "rebalance" else rebalance.remove_member(namespace, removed)
    assert "/d/f1" in done.failed["the records"]
    assert done.files
    assert removed in namespace.ring.all_members, "it has the only record that is whole"
    assert [name for name, _ in namespace.open_members[removed].registers.scan("/d/f1")] == ["/d/f1"]
    for path, data in content().items():
        file = namespace.stat(path) if path != "d/f1" else None
        if file is not None and file.layout is not None and change != "rebalance":
            assert removed not in {each.member for each in file.layout.objects}
        if path != "d/f1":
            assert namespace.get(path) == data
    with pytest.raises(Unavailable, match="d/f1"):
        namespace.list()
    namespace.close()


def refuse() -> MemberInfo:
    """Fail as a member that does not answer."""
    raise Unavailable("it does not answer")
