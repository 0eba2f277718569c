"""Repair of a namespace: lost, rotten or missing fragments and records are found and made again."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.damaged_namespaces import assert_whole, content, damage_fragment, filled_namespace, large_file
from helpers.namespace_files import member_objects
from helpers.nodes import LocalNode, NodeProcess, directories, node_processes, nodes_config, quick
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io import rebuild
from ckpt.aggregator.file_io.member_choice import MemberChoice
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.storage.base.errors import NoSpace, StoreError, Unavailable
from ckpt.storage.node.client import NodeStore
from ckpt.storage.testing import random_bytes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    """Four nodes in processes of their own."""
    with node_processes(tmp_path, 4) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(("redundancy", "lost"), [("2x", 1), ("3x", 2), ("4+2", 1)])
def test_lost_disks_are_rebuilt_in_turn(tmp_path: Path, redundancy: str, lost: int) -> None:
    """Empty folders replace lost ones, one after the other."""
    namespace = filled_namespace(tmp_path, redundancy)
    require_whole(namespace, verify=True)
    namespace.close()
    for i in range(3):
        for j in range(lost):
            shutil.rmtree(tmp_path / f"disk{(i + j) % 6}" / "objects", ignore_errors=True)
        namespace = Namespace(directories(tmp_path, 6, redundancy=redundancy))
        found = scrub.scrub_namespace(namespace)
        assert [f.spare_fragments for f in found.damaged_files] == sorted(f.spare_fragments for f in found.damaged_files), (
            "the most endangered first"
        )
        done = repair.repair_namespace(namespace, found)
        assert not done.failed
        assert_whole(namespace, redundancy)
        namespace.close()


def test_a_repair_with_too_few_members_restores_what_it_can(tmp_path: Path) -> None:
    """4+2 on six: one member is absent, another returns empty. Its fragments are made again; the absent one keeps its own."""
    namespace = filled_namespace(tmp_path, "4+2", 6)
    namespace.close()
    shutil.rmtree(tmp_path / "disk1" / "objects")
    (tmp_path / "disk0").rename(tmp_path / "away")
    (tmp_path / "disk0").write_text("no directory")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    found = scrub.scrub_namespace(namespace)
    assert found.damaged_files
    assert {f.spare_fragments for f in found.damaged_files} == {0}
    done = repair.repair_namespace(namespace, found)
    assert set(done.failed) == {f.path for f in found.damaged_files}
    assert all("only 5 of 6 fragments exist" in reason for reason in done.failed.values()), done.failed
    assert {f.spare_fragments for f in scrub.scrub_namespace(namespace, verify=True).damaged_files} == {1}
    namespace.close()
    (tmp_path / "disk0").unlink()
    (tmp_path / "away").rename(tmp_path / "disk0")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    namespace.settle([f"/{path}" for path in content()])
    assert_whole(namespace, "4+2")  # without a second repair, and with each fragment on another member
    namespace.close()


def test_members_with_rot_in_one_stripe_serve_the_other_stripes(tmp_path: Path) -> None:
    """Two members have rot, each in another stripe, and a third is lost: enough fragments of each stripe are left."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(6)]
    namespace = quick(nodes_config(nodes, redundancy="4+2"))
    data = random_bytes(30_000_000, 1)
    namespace.put("a", data)
    layout = large_file(namespace, "a").layout
    namespace.close()
    assert layout is not None
    for index, node in enumerate(nodes[1:3]):
        damage_fragment(layout, index, node.address, node.folder)
    nodes[0].close()
    namespace = quick(nodes_config(nodes, redundancy="4+2"))
    for _ in range(3):
        assert namespace.get("a") == data
    for each in (namespace, *nodes[1:]):
        each.close()


@pytest.mark.slow
def test_rot_is_repaired_while_a_member_is_absent(tmp_path: Path) -> None:
    """4+2 on six: one is absent, and two others have rot, each in another stripe. All is read, and a repair does what it can:
    once the absent one is back, two more may be lost."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    data = random_bytes(30_000_000, 1)
    namespace.put("a", data)
    namespace.settle(["/a"])
    layout = large_file(namespace, "a").layout
    namespace.close()
    assert layout is not None
    for index, member in enumerate(["disk1", "disk2"]):
        damage_fragment(layout, index, member, tmp_path / member)
    (tmp_path / "disk0").rename(tmp_path / "away")
    (tmp_path / "disk0").write_text("no directory")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    assert namespace.get("a") == data
    found = scrub.scrub_namespace(namespace, verify=True)
    assert [f.spare_fragments for f in found.damaged_files] == [0]
    assert set(repair.repair_namespace(namespace, found).failed) == {"a"}
    namespace.close()
    (tmp_path / "disk0").unlink()
    (tmp_path / "away").rename(tmp_path / "disk0")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    assert not scrub.scrub_namespace(namespace, verify=True).damaged_files
    namespace.close()
    for lost in ("disk1", "disk2"):
        shutil.rmtree(tmp_path / lost / "objects")
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    assert namespace.get("a") == data
    namespace.close()


def test_a_repair_reads_nothing_for_a_full_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repair tries the full member once, and reads nothing for it."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    namespace.put("first", b"1")

    def full(*_: object) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(namespace.open_members["disk0"].store, "create", full)
    namespace.put("a", random_bytes(20_000_000, 1))
    found = scrub.scrub_namespace(namespace)
    monkeypatch.setattr("ckpt.aggregator.file_io.source_objects.SourceObjects.read", lambda *_: pytest.fail("it was read"))
    done = repair.repair_namespace(namespace, found)
    assert list(done.failed) == ["a"]
    assert done.nbytes == 0
    namespace.close()


def test_a_repair_does_not_count_a_full_member_as_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It still answers reads, and the lost fragments go to the other members."""
    nodes = [LocalNode(tmp_path / f"n{i}", capacity=1 << 30) for i in range(4)]
    namespace = Namespace(nodes_config(nodes, redundancy="2x", deadline_seconds=60.0))
    files = {f"f{i}": random_bytes(100_000, i) for i in range(60)}
    for path, data in files.items():
        namespace.put(path, data)
    full, emptied = nodes[0], namespace.open_members[nodes[1].address]
    full.device._capacity_bytes = 0
    emptied.store.delete(list(emptied.inventory()))
    done = repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
    assert f"{full.address} takes no more rebuilt fragments" in caplog.text
    assert not namespace.fan_out.health.is_down(full.address)
    assert "gets no calls" not in caplog.text
    assert done.files
    assert {path: namespace.get(path) for path in files} == files
    for each in (namespace, *nodes):
        each.close()


def test_an_object_that_can_not_be_quarantined_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    namespace = Namespace(directories(tmp_path, 1, redundancy="1x"))
    for path in ("a", "b"):
        namespace.put(path, random_bytes(100_000, 1))
    (linked,), (damaged,) = (member_objects(namespace, path) for path in ("a", "b"))
    objects = tmp_path / "disk0" / "objects"
    (objects / linked[1]).rename(tmp_path / "elsewhere")
    (objects / linked[1]).symlink_to(tmp_path / "elsewhere")  # as an operator does who frees space
    repair._quarantine(namespace, [linked, damaged])
    assert f"the damaged object {linked[1]} on disk0 can't be quarantined: " in caplog.text
    assert not (objects / damaged[1]).exists()
    assert len(list((tmp_path / "disk0" / "quarantine").iterdir())) == 1
    namespace.close()


def test_a_repair_counts_no_object_that_it_could_not_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = Namespace(directories(tmp_path, 3, redundancy="2x"))
    namespace.put("a", random_bytes(100_000, 1))
    for i in range(3):
        with namespace.open_members[f"disk{i}"].store.create("aa/left-by-a-dead-client") as writer:
            writer.commit()

    def failing(_: object) -> None:
        raise StoreError("the file system is read-only")

    monkeypatch.setattr(namespace.open_members["disk1"].store, "delete", failing)
    done = repair.repair_namespace(namespace, scrub.scrub_namespace(namespace, grace_seconds=0.0))
    assert done.orphans == 2
    (left,) = tmp_path.glob("disk*/objects/aa/left-by-a-dead-client")
    assert left.is_relative_to(tmp_path / "disk1")
    namespace.close()


@pytest.mark.slow
def test_a_repair_reads_no_fragment_of_a_silent_member_that_others_can_replace(
    processes: list[NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read would wait for the deadline: for a file of many stripes, that is hours."""
    namespace = Namespace(nodes_config(processes, redundancy="2x"))
    data = random_bytes(40 * 40_960, 1)
    with namespace.create("a") as writer:
        for start in range(0, len(data), 40_960):
            writer.append(memoryview(data)[start : start + 40_960])
        writer.commit()
    silent = processes[0]
    reads: list[str] = []
    descriptor = NodeStore.descriptor

    def noted(store: NodeStore, name: str) -> int | None:
        reads.append(store.address)
        if store.address == silent.address:
            raise Unavailable("no answer")  # at once, and not after the deadline
        return descriptor(store, name)

    monkeypatch.setattr(NodeStore, "descriptor", noted)
    silent.signal(signal.SIGSTOP)
    found = scrub.scrub_namespace(namespace)
    assert [health.path for health in found.damaged_files] == ["a"]
    done = repair.repair_namespace(namespace, found)
    assert silent.stopped()
    assert reads.count(silent.address) == 0
    assert done.files == 1
    assert namespace.get("a") == data
    namespace.close()


def test_a_fragment_is_in_another_domain_than_that_of_a_member_that_is_down(tmp_path: Path) -> None:
    """Otherwise both copies would be lost with one rack."""
    racks = {"disk0": "a", "disk1": "b", "disk2": "b", "disk3": "c"}
    members = [{"url": str(tmp_path / name), "name": name, "domain": rack} for name, rack in racks.items()]
    namespace = Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))
    namespace.fan_out.health.record_failure("disk1", "no answer")
    targets = rebuild._Targets(namespace.member_io, frozenset(), frozenset(["disk0"]), allow_partial=False)
    assert {tuple(targets.choose(f"{key}", 1, ["disk1"])) for key in range(20)} == {("disk3",)}
    choice = MemberChoice(namespace.member_io, "a", "version", namespace.config.redundancy)  # of a file that is being written
    choice.mark_failed("disk0", Unavailable("no answer"))
    assert {tuple(choice.choose(index, 1, ["disk1"])) for index in range(20)} == {("disk3",)}
    namespace.close()
