"""Members are drained, and files are spread over new members."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from helpers.damaged_namespaces import content, filled, whole
from helpers.nodes import Here, directories

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes


@pytest.mark.parametrize("redundancy", ["1x", "2x", "4+2"])
def test_draining(tmp_path: Path, redundancy: str) -> None:
    """All goes elsewhere, of files that lie there alone too; then its disk may go."""
    namespace = filled(tmp_path, redundancy, 7)
    assert not rebalance.drain_member(namespace, "disk1").failed
    assert not namespace.open_members["disk1"].inventory()
    whole(namespace, redundancy)
    with pytest.raises(InvalidArgument, match="disk9 is not a member"):
        rebalance.drain_member(namespace, "disk9")
    namespace.close()


def test_draining_what_is_read_only(tmp_path: Path) -> None:
    """It could delete nothing. Taken out for ever it can be, and nothing is lost."""
    nodes = [Here(tmp_path / f"n{i}") for i in range(4)]

    def opened() -> Namespace:
        members = [{"url": node.address, "name": f"n{i}"} for i, node in enumerate(nodes)]
        return Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))

    with closing(opened()) as namespace:
        for path, data in content().items():
            namespace.put(path, data)
    nodes[0].close()
    nodes[0] = Here(tmp_path / "n0", NodeOptions(read_only=True))
    with closing(opened()) as namespace:
        with pytest.raises(InvalidArgument, match="n0 is read-only, so that it can't delete"):
            rebalance.drain_member(namespace, "n0")
        assert not rebalance.remove_member(namespace, "n0").failed
        assert surveys.scrub_namespace(namespace, verify=True).is_whole
    for node in nodes:
        node.close()


def test_rebalancing(tmp_path: Path) -> None:
    """Two more members: they get their part, and no more than that is moved."""
    namespace = Namespace(directories(tmp_path, 4))
    for i in range(40):
        namespace.put(f"f{i}", random_bytes(40_000, i))
    namespace.close()
    grown = Namespace(directories(tmp_path, 6))
    done = rebalance.rebalance_fragments(grown)
    assert not done.failed
    held = {name: len(place.inventory()) for name, place in grown.open_members.items()}
    assert sum(held.values()) == 80
    assert min(held["disk4"], held["disk5"]) > 4
    assert done.nbytes <= 40_000 * (held["disk4"] + held["disk5"]), "only what the new ones take"
    for i in range(40):
        assert grown.get(f"f{i}") == random_bytes(40_000, i)
    assert not rebalance.rebalance_fragments(grown).files
    assert surveys.scrub_namespace(grown, verify=True).is_whole
    grown.close()
