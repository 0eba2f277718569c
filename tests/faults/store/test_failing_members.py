"""Members of a namespace fail while a file is written: full disks, lost nodes, a clock that jumps."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.namespace_files import NEW, fragment_counts
from helpers.nodes import LocalNode, NodeProcess, directories, nodes_config, quick
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.storage.base.errors import NoSpace, Unavailable
from ckpt.storage.base.plural import format_count
from ckpt.storage.testing import random_bytes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("redundancy", "count"), [("4+2", 6), ("3x", 3)])
def test_files_are_written_with_fewer_members_while_a_loss_is_tolerated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, redundancy: str, count: int, number: int
) -> None:
    """One of the nodes that a file needs is lost: files are written without it while one more loss is tolerated. When that one
    is lost too, no file is written, and all files are read. When both are back, a repair makes all files whole."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(count)]
    namespace = quick(nodes_config(nodes, redundancy=redundancy, deadline_seconds=2.0))
    contents = {path: random_bytes(20_000_000, i) for i, path in enumerate("abc")}
    full, code = count, parse_redundancy(redundancy)
    try:
        namespace.put("a", contents["a"])
        nodes[0].signal(number)
        namespace.put("b", contents["b"])
        namespace.put("c", contents["c"])
        assert fragment_counts(namespace, "a") == {full}
        assert fragment_counts(namespace, "c") == {full - 1}
        assert (
            f"of {namespace.url} is on {format_count(full - 1, 'member')}, but {redundancy} needs {full}: the other"
            in caplog.text
        )
        for node in nodes[1 : full - code.min_write_fragments + 1]:
            node.signal(number)
        with pytest.raises(Unavailable) as refused:
            namespace.put("d", contents["a"])
        if code.data_fragments > 1:  # with whole copies too few members have the records
            assert f"needs {format_count(code.min_write_fragments, 'member')} for {redundancy}" in str(refused.value)
            for path, data in contents.items():
                assert namespace.get(path) == data
        namespace.close()
        for node in nodes:
            node.close()
            node.start()
        fresh = quick(nodes_config(nodes, redundancy=redundancy))
        assert {f.path for f in scrub.scrub_namespace(fresh).damaged_files} >= {"c"}
        assert not repair.repair_namespace(fresh, scrub.scrub_namespace(fresh)).failed
        for path, data in contents.items():
            assert fragment_counts(fresh, path) == {full}
            assert fresh.get(path) == data
        fresh.close()
    finally:
        namespace.close()
        for node in nodes:
            node.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_file_survives_one_of_six_nodes_lost_before_its_commit(tmp_path: Path, lost: int) -> None:
    """When one node is lost, the file exists without it. When two are lost, it can't be written, and the commit raises an
    error."""
    nodes = [NodeProcess(tmp_path / f"n{i}", "--no-fd-passing") for i in range(6)]
    namespace = quick(nodes_config(nodes, redundancy="4+2"))
    data = random_bytes(3_000_000, 1)
    try:
        with namespace.create("a") as writer:
            writer.append(memoryview(data))
            for node in nodes[:lost]:
                node.kill()
            if lost == 1:
                writer.commit()
            else:
                with pytest.raises(Unavailable):
                    writer.commit()
        if lost == 1:
            assert fragment_counts(namespace, "a") == {5}
            assert namespace.get("a") == data
        else:
            assert namespace.stat("a") is None
    finally:
        namespace.close()
        for node in nodes:
            node.close()


def fail_member(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, writer: FileWriter, member: str) -> None:
    """Let a member make nothing durable any more, and accept no new object."""

    def refuse(*_: object) -> NoReturn:
        raise Unavailable("a test")

    (object_writer,) = [
        w for h, w in zip(writer._objects, writer._writers, strict=True) if h.member == member and w is not None
    ]
    monkeypatch.setattr(object_writer, "commit", refuse)
    monkeypatch.setattr(namespace.open_members[member].store, "create", refuse)


@pytest.mark.parametrize(("redundancy", "count"), [("4+2", 7), ("3x", 4)])
def test_a_commit_succeeds_with_the_fewest_fragments_it_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redundancy: str, count: int
) -> None:
    """Two members make nothing durable; with one spare member, the remaining fragments are the fewest that a write accepts."""
    namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
    data = random_bytes(3_000_000, 1)
    namespace.put("first", b"1")
    with namespace.create("a", aligned=False) as writer:
        writer.append(memoryview(data))
        for member in list(writer._object_by_member)[:2]:
            fail_member(namespace, monkeypatch, writer, member)
        writer.commit()
    assert fragment_counts(namespace, "a") == {parse_redundancy(redundancy).min_write_fragments}
    assert not list(tmp_path.rglob("*.ckpt-tmp")), "a temporary file of a failed member is left"
    assert namespace.get("a") == data
    namespace.close()


def test_an_append_that_a_member_misses_keeps_its_earlier_fragments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that can't make the appended stripe durable still has the earlier one."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    data = random_bytes(3_000_000, 1)
    namespace.put("a", data)
    for times, member in enumerate(["disk3", "disk1"], 1):
        with namespace.create("a", aligned=False, base=namespace.stat("a")) as writer, monkeypatch.context() as patch:
            writer.append(memoryview(data))
            fail_member(namespace, patch, writer, member)
            writer.commit()
        file = namespace.stat("a")
        assert file is not None
        assert file.layout is not None
        assert [sum(f is not None for f in p.fragments) for p in file.layout.stripes] == [6] + [5] * times
        namespace.fan_out.health.record_answer(member)
    assert namespace.get("a") == data * 3
    namespace.close()


def test_a_member_that_answers_before_the_commit_gets_all_fragments(tmp_path: Path) -> None:
    """The writer skips it for the first stripe, and uses it again before the commit."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    data = random_bytes(3_000_000, 1)
    namespace.put("first", b"1")
    namespace.fan_out.health.record_failure("disk3", "a test")
    with namespace.create("a", aligned=False) as writer:
        writer.append(memoryview(data))
        namespace.fan_out.health.record_answer("disk3")
        writer.append(memoryview(data))
        writer.commit()
    assert fragment_counts(namespace, "a") == {6}
    require_whole(namespace, verify=True)
    assert namespace.get("a") == data + data
    namespace.close()


def test_a_file_continues_on_other_members_when_a_node_is_full(tmp_path: Path) -> None:
    """The node gets full in the middle of a file: the rest goes to other members with the same redundancy."""
    nodes = [LocalNode(tmp_path / f"n{i}", capacity=6_000_000 if i == 0 else None) for i in range(4)]
    namespace = Namespace(nodes_config(nodes))
    data = random_bytes(64_000_000)
    with namespace.create("a", aligned=False) as writer:
        for start in range(0, len(data), 2_000_000):
            writer.append(memoryview(data)[start : start + 2_000_000])
        writer.commit()
    assert namespace.get("a") == data
    file = namespace.stat("a")
    assert file is not None
    assert file.layout is not None
    assert all(len({f.object_index for f in p.fragments if f is not None}) == 2 for p in file.layout.stripes)
    for node in nodes[1:]:
        node.device._capacity_bytes = 0
    with pytest.raises((NoSpace, Unavailable), match="needs 2 members for 2x"):
        namespace.put("b", NEW)
    assert namespace.get("a") == data
    for each in (namespace, *nodes):
        each.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_files_are_written_beside_a_member_with_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "disk0"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted on this host")
    try:
        namespace = Namespace(directories(tmp_path, 4))
        for i in range(12):
            namespace.put(f"f{i}", random_bytes(3_000_000, i))
        for i in range(12):
            assert namespace.get(f"f{i}") == random_bytes(3_000_000, i)
        assert scrub.scrub_namespace(namespace, verify=True).files == 12
        namespace.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_jumping_clock_changes_neither_order_nor_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps years ahead and back: the newest content does not depend on it, and no live object is deleted."""
    namespace = Namespace(directories(tmp_path, 4))
    now = time.time()
    for i, shift in enumerate([0, 3e8, -3e8, 1e9, 0]):
        monkeypatch.setattr(time, "time", lambda shift=shift: now + shift)
        namespace.put("a", random_bytes(50_000, i))
        assert namespace.get("a") == random_bytes(50_000, i)
        if i % 2:
            namespace.delete(["a"])
            assert namespace.stat("a") is None
        repair.repair_namespace(namespace, scrub.scrub_namespace(namespace, verify=True))
        if not i % 2:
            assert namespace.get("a") == random_bytes(50_000, i)
    namespace.close()
