"""Members of a namespace fail while a file is written: full disks, lost nodes, a clock that jumps."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.namespace_files import NEW, there
from helpers.nodes import Here, Process, directories, nodes_config, quick

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.storage.base.errors import NoSpace, Unavailable
from ckpt.storage.testing import random_bytes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("redundancy", "count"), [("4+2", 6), ("3x", 3)])
def test_writing_goes_on_with_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, redundancy: str, count: int, number: int
) -> None:
    """One node is lost where each is needed: files are written without it, as one more may be lost. Without that one, too,
    nothing is written any more, and all is read. When both are back, a repair makes all whole."""
    nodes = [Process(tmp_path / f"n{i}") for i in range(count)]
    namespace = quick(nodes_config(nodes, redundancy=redundancy, deadline_seconds=2.0))
    known = {path: random_bytes(20_000_000, i) for i, path in enumerate("abc")}
    full, code = count, parse_redundancy(redundancy)
    try:
        namespace.put("a", known["a"])
        nodes[0].signal(number)
        namespace.put("b", known["b"])
        namespace.put("c", known["c"])
        assert there(namespace, "a") == {full}
        assert there(namespace, "c") == {full - 1}
        assert f"of {namespace.url} is on {full - 1} members where {redundancy} needs {full}" in caplog.text
        for node in nodes[1 : full - code.min_write_fragments + 1]:
            node.signal(number)
        with pytest.raises(Unavailable) as refused:
            namespace.put("d", known["a"])
        if code.data_fragments > 1:  # else too few know what there is
            assert f"needs {code.min_write_fragments} members for {redundancy}" in str(refused.value)
            for path, data in known.items():
                assert namespace.get(path) == data
        namespace.close()
        for node in nodes:
            node.close()
            node.start()
        fresh = quick(nodes_config(nodes, redundancy=redundancy))
        assert {f.path for f in surveys.scrub_namespace(fresh).damaged_files} >= {"c"}
        assert not repairs.repair_namespace(fresh, surveys.scrub_namespace(fresh)).failed
        for path, data in known.items():
            assert there(fresh, path) == {full}
            assert fresh.get(path) == data
        fresh.close()
    finally:
        namespace.close()
        for node in nodes:
            node.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_nodes_are_lost_before_a_file_is_durable(tmp_path: Path, lost: int) -> None:
    """One of six: the file is there without it. Two: it can't be made, and that is said."""
    nodes = [Process(tmp_path / f"n{i}", "--no-near") for i in range(6)]
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
            assert there(namespace, "a") == {5}
            assert namespace.get("a") == data
        else:
            assert namespace.stat("a") is None
    finally:
        namespace.close()
        for node in nodes:
            node.close()


def failing(namespace: Namespace, monkeypatch: pytest.MonkeyPatch, writer: FileWriter, member: str) -> None:
    """Let a member make nothing durable any more, and take nothing new."""

    def no(*_: object) -> NoReturn:
        raise Unavailable("a test")

    (mine,) = [w for h, w in zip(writer._objects, writer._writers, strict=True) if h.member == member and w is not None]
    monkeypatch.setattr(mine, "commit", no)
    monkeypatch.setattr(namespace.open_members[member].store, "create", no)


@pytest.mark.parametrize(("redundancy", "count"), [("4+2", 7), ("3x", 4)])
def test_members_fail_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redundancy: str, count: int) -> None:
    """Two make nothing durable, and with a spare as many are left as a write settles for."""
    namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
    data = random_bytes(3_000_000, 1)
    namespace.put("first", b"1")
    with namespace.create("a", aligned=False) as writer:
        writer.append(memoryview(data))
        for member in list(writer._object_by_member)[:2]:
            failing(namespace, monkeypatch, writer, member)
        writer.commit()
    assert there(namespace, "a") == {parse_redundancy(redundancy).min_write_fragments}
    assert not list(tmp_path.rglob("*.ckpt-tmp")), "what could not be made durable is given up"
    assert namespace.get("a") == data
    namespace.close()


def test_an_append_leaves_what_it_was_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that can't make the new part durable still has the old one."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    data = random_bytes(3_000_000, 1)
    namespace.put("a", data)
    for times, member in enumerate(["disk3", "disk1"], 1):
        with namespace.create("a", aligned=False, base=namespace.stat("a")) as writer, monkeypatch.context() as patch:
            writer.append(memoryview(data))
            failing(namespace, patch, writer, member)
            writer.commit()
        file = namespace.stat("a")
        assert file is not None
        assert file.layout is not None
        assert [sum(f is not None for f in p.fragments) for p in file.layout.stripes] == [6] + [5] * times
        namespace.fan_out.health.record_answer(member)
    assert namespace.get("a") == data * 3
    namespace.close()


def test_a_member_that_answers_again_has_its_part(tmp_path: Path) -> None:
    """It was left alone while the pieces were written, and not any more when they are made durable."""
    namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
    data = random_bytes(3_000_000, 1)
    namespace.put("first", b"1")
    namespace.fan_out.health.record_failure("disk3", "a test")
    with namespace.create("a", aligned=False) as writer:
        writer.append(memoryview(data))
        namespace.fan_out.health.record_answer("disk3")
        writer.append(memoryview(data))
        writer.commit()
    assert there(namespace, "a") == {6}
    assert surveys.scrub_namespace(namespace, verify=True).is_whole
    assert namespace.get("a") == data + data
    namespace.close()


def test_a_full_node(tmp_path: Path) -> None:
    """In the middle of a file: the rest goes elsewhere, as redundant as before."""
    nodes = [Here(tmp_path / f"n{i}", capacity=6_000_000 if i == 0 else None) for i in range(4)]
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
def test_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "disk0"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        namespace = Namespace(directories(tmp_path, 4))
        for i in range(12):
            namespace.put(f"f{i}", random_bytes(3_000_000, i))
        for i in range(12):
            assert namespace.get(f"f{i}") == random_bytes(3_000_000, i)
        assert surveys.scrub_namespace(namespace, verify=True).files == 12
        namespace.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Years ahead and back: which content is the newest does not depend on it, nor is anything alive deleted."""
    namespace = Namespace(directories(tmp_path, 4))
    now = time.time()
    for i, shift in enumerate([0, 3e8, -3e8, 1e9, 0]):
        monkeypatch.setattr(time, "time", lambda shift=shift: now + shift)
        namespace.put("a", random_bytes(50_000, i))
        assert namespace.get("a") == random_bytes(50_000, i)
        if i % 2:
            namespace.delete(["a"])
            assert namespace.stat("a") is None
        repairs.repair_namespace(namespace, surveys.scrub_namespace(namespace, verify=True))
        if not i % 2:
            assert namespace.get("a") == random_bytes(50_000, i)
    namespace.close()
