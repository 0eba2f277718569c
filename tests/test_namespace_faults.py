"""Faults of the namespace: clients and nodes killed at every named point, cut wires, full disks, rubbish for an answer."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cluster import Here, Link, Process, directories, garbage, nodes_config, quick

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.writer import FileWriter
from ckpt.aggregator.maintenance import repair as repairs
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.storage.base.errors import AlreadyExists, NoSpace, StoreError, Unavailable
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes

SOAK = bool(os.environ.get("CKPT_SOAK"))

OLD, NEW = random_bytes(70_000, 1), random_bytes(9_000_000, 2)

CLIENT = """
import sys
from pathlib import Path
from cluster import directories
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.testing import random_bytes
namespace = Namespace(directories(Path(sys.argv[1]), 5, redundancy=sys.argv[3]))
what = sys.argv[2]
if what == "put":
    namespace.put("a", random_bytes(9_000_000, 2))
elif what == "new":
    namespace.put("b", random_bytes(9_000_000, 2), new=True)
elif what == "delete":
    namespace.delete(["a"])
elif what == "rename":
    namespace.rename("a", "b")
print("done", flush=True)
"""


def run(folder: Path, what: str, redundancy: str, failpoints: str) -> int:
    environment = os.environ | {"CKPT_FAILPOINTS": failpoints, "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-c", CLIENT, str(folder), what, redundancy]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


POINTS = [
    "namespace.append", "namespace.append@2", "local.append@2", "local.fsync", "local.rename", "namespace.commit",
    "namespace.record", "ledger.change", "ledger.changed", "registers.commit", "registers.commit@2", "registers.committed",
    "registers.committed@2", "registers.committed@3", "namespace.recorded", "namespace.rename", "namespace.renamed",
    "ledger.prepare", "ledger.accept", "ledger.accepted", "local.delete",
]  # fmt: skip


@pytest.mark.parametrize("redundancy", ["2x", "3+2"])
@pytest.mark.parametrize("what", ["put", "new", "delete", "rename"])
@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS if SOAK else POINTS[::2])
def test_a_client_is_killed(tmp_path: Path, what: str, point: str, redundancy: str) -> None:
    """What was there is there, whole, or what was to be: never a mixture. The next one works, and nothing is left over."""
    config = directories(tmp_path, 5, redundancy=redundancy)
    namespace = Namespace(config)
    namespace.put("a", OLD)
    namespace.close()
    name, _, at = point.partition("@")
    code = run(tmp_path, what, redundancy, f"{name}=kill@{at or 1}")
    assert code in (0, -9)
    namespace = Namespace(config)
    there = {path: namespace.get(path) for path in namespace.list()}
    if what == "put":
        assert there in ({"a": OLD}, {"a": NEW}), point
        assert code or there == {"a": NEW}
    elif what == "new":
        assert there in ({"a": OLD}, {"a": OLD, "b": NEW}), point
        assert code or "b" in there
    elif what == "delete":
        assert there in ({"a": OLD}, {}), point
        assert code or not there
    else:
        assert there in ({"a": OLD}, {"a": OLD, "b": OLD}, {"b": OLD}), point
        assert code or there == {"b": OLD}
    for path in ("a", "b", "c"):
        namespace.put(path, NEW)
    namespace.delete(["b"])
    assert {path: namespace.get(path) for path in namespace.list()} == {"a": NEW, "c": NEW}
    grace, surveys.GRACE_SECONDS = surveys.GRACE_SECONDS, -60.0
    try:
        repairs.repair_namespace(namespace, surveys.scrub_namespace(namespace))
        assert surveys.scrub_namespace(namespace, verify=True).is_whole
    finally:
        surveys.GRACE_SECONDS = grace
    assert {path: namespace.get(path) for path in namespace.list()} == {"a": NEW, "c": NEW}
    held = sum(len([p for p in (tmp_path / f"disk{i}" / "objects").rglob("*") if p.is_file()]) for i in range(5))
    file = namespace.stat("a")
    other = namespace.stat("c")
    assert file is not None
    assert file.layout is not None
    assert other is not None
    assert other.layout is not None
    assert held == len(file.layout.objects) + len(other.layout.objects), "no object is left that nobody needs"
    namespace.close()


NODE_POINTS = [
    "node.append@2", "node.commit", "node.committed", "registers.commit@4", "registers.committed@5", "local.fsync@5",
    "node.get@2",
]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("point", NODE_POINTS)
def test_nodes_die_at_a_point(tmp_path: Path, point: str, number: int) -> None:
    fail_at(tmp_path, point, number, "kill")


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2] if SOAK else [1])
@pytest.mark.parametrize("point", NODE_POINTS if SOAK else ["node.append@2"])
def test_nodes_stand_still_at_a_point(tmp_path: Path, point: str, number: int) -> None:
    fail_at(tmp_path, point, number, "stop")


def fail_at(tmp_path: Path, point: str, number: int, action: str) -> None:
    """As many as the redundancy says: what was acknowledged is there, before they come back and after."""
    redundancy, count = ("2x", 4) if number == 1 else ("3+2", 7)
    name, _, at = point.partition("@")
    wire = [] if action == "kill" else ["--no-near"]
    points = [f"{name}={action}@{at or 1}" if i < number else "" for i in range(count)]
    nodes = [Process(tmp_path / f"n{i}", *wire, failpoints=point) for i, point in enumerate(points)]
    namespace = quick(nodes_config(nodes, redundancy=redundancy, deadline_seconds=5.0 if action == "kill" else 3.0))
    try:
        known: dict[str, bytes] = {}
        for i in range(6):
            data = random_bytes([100, 50_000, 3_000_000][i % 3], i)
            try:
                namespace.put(f"f{i}", data)
                known[f"f{i}"] = data
            except Unavailable:
                assert i == 0, "only where the namespace is made must all be there"
        for path, data in known.items():
            assert namespace.get(path) == data
        assert known
        for node in nodes[:number]:
            if node.stopped():
                node.kill()
            if node.process.poll() is not None:
                node._failpoints = ""
                node.start()
        fresh = quick(nodes_config(nodes, redundancy=redundancy, deadline_seconds=5.0))
        for path, data in known.items():
            assert fresh.get(path) == data
        assert not repairs.repair_namespace(fresh, surveys.scrub_namespace(fresh, verify=True)).failed
        fresh.close()
    finally:
        namespace.close()
        for node in nodes:
            node.close()


@pytest.mark.soak
@pytest.mark.parametrize("action", ["kill", "stop"] if SOAK else ["stop"])
@pytest.mark.parametrize(
    "point", ["node.get", "node.append@2", "node.commit", "node.committed", "registers.commit"] if SOAK else ["node.get"]
)
def test_a_node_fails_in_a_repair(tmp_path: Path, point: str, action: str) -> None:
    """One disk is lost, and another node fails while that is mended: all is readable, and the next repair ends it. Those that
    hold most."""
    name, _, at = point.partition("@")
    nodes = [Process(tmp_path / f"n{i}", "--no-near") for i in range(5)]
    namespace = quick(nodes_config(nodes, redundancy="3x", deadline_seconds=3.0))
    try:
        known = {f"f{i}": random_bytes([50_000, 3_000_000][i % 2], i) for i in range(4)}
        for path, data in known.items():
            namespace.put(path, data)
        namespace.settle([f"/{path}" for path in known])
        namespace.close()
        objects = [tmp_path / f"n{i}" / "objects" for i in range(5)]
        lost, other = sorted(range(5), key=lambda i: -sum(1 for _ in objects[i].rglob("*")))[:2]
        shutil.rmtree(objects[lost])
        failing = nodes[other]
        failing.kill()
        failing._failpoints = f"{name}={action}@{at or 1}"
        failing.start()
        namespace = quick(nodes_config(nodes, redundancy="3x", deadline_seconds=3.0))
        with suppress(StoreError):  # it may fail as a whole, where the node was needed for more than its fragments
            repairs.repair_namespace(namespace, surveys.scrub_namespace(namespace))
        for path, data in known.items():
            assert namespace.get(path) == data
        failing.kill()
        failing._failpoints = ""
        failing.start()
        fresh = quick(nodes_config(nodes, redundancy="3x"))
        assert not repairs.repair_namespace(fresh, surveys.scrub_namespace(fresh, verify=True)).failed
        found = surveys.scrub_namespace(fresh, verify=True)
        assert not found.damaged_files
        assert not found.missing_members
        for path, data in known.items():
            assert fresh.get(path) == data
        fresh.close()
    finally:
        namespace.close()
        for node in nodes:
            node.close()


def there(namespace: Namespace, path: str) -> set[int]:
    """How many fragments the pieces of a file have."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    return {sum(f is not None for f in piece.fragments) for piece in file.layout.stripes}


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
        assert f"of {namespace.url} is on {full - 1} members where {redundancy} asks for {full}" in caplog.text
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_two_of_six_at_random_moments(tmp_path: Path, number: int) -> None:
    """4+2: two nodes fail while files are written and read; every acknowledged file is there."""
    seed = int(os.environ.get("CKPT_SEED", random.randrange(10**6)))
    print("seed", seed)
    draw = random.Random(seed)
    nodes = [Process(tmp_path / f"n{i}") for i in range(8)]
    namespace = quick(nodes_config(nodes, redundancy="4+2", deadline_seconds=2.0))
    known: dict[str, bytes] = {}
    try:
        namespace.put("first", b"all are there once")
        stop = threading.Event()

        def hurt() -> None:
            for node in draw.sample(nodes, 2):
                time.sleep(draw.uniform(0.0, 0.6))
                node.signal(number)
            stop.set()

        thread = threading.Thread(target=hurt)
        thread.start()
        after = 0
        for i in itertools.count():
            data = random_bytes(draw.choice([100, 40_000, 2_000_000]), i)
            namespace.put(f"f{i}", data)
            known[f"f{i}"] = data
            path = draw.choice(list(known))
            assert namespace.get(path) == known[path], (seed, path)
            after += stop.is_set()
            if after > 4:
                break
        thread.join()
        for path, data in known.items():
            assert namespace.get(path) == data, (seed, path)
        assert set(namespace.list()) == {"first", *known}
    finally:
        namespace.close()
        for node in nodes:
            node.close()


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[tuple[list[Here], list[list[Link]]]]:
    """Three nodes, and for each of two clients a wire of its own to each, which all bytes take."""
    nodes = [Here(tmp_path / f"n{i}", NodeOptions(pass_descriptors=False)) for i in range(3)]
    links = [[Link(node.address) for node in nodes] for _ in range(2)]
    yield nodes, links
    for link in itertools.chain(*links):
        link.close()
    for node in nodes:
        node.close()


def through(links: list[Link]) -> Namespace:
    """A client whose wires are these; the members have the same names for all clients."""
    members = [{"url": link.address, "name": f"n{i}"} for i, link in enumerate(links)]
    config = config_from_table("test", {"members": members, "redundancy": "1x", "deadline_seconds": 2.0}, "the test")
    return quick(config)


@pytest.mark.parametrize("how", ["severed", "held"])
def test_a_network_that_is_cut_in_part(linked: tuple[list[Here], list[list[Link]]], how: str) -> None:
    """One client does not reach the first node, the other not the last: both go on, and agree on everything."""
    _, links = linked
    clients = [through(each) for each in links]
    clients[0].put("a", b"0")
    for link in (links[0][0], links[1][2]):
        link.sever() if how == "severed" else link.hold(True)
    for i in range(4):
        outcomes: list[str] = []
        for number, client in enumerate(clients):
            try:
                client.put(f"race{i}", f"{number}".encode(), new=True)
                outcomes.append("won")
            except AlreadyExists:
                outcomes.append("lost")
        assert sorted(outcomes) == ["lost", "won"]
        assert {client.get(f"race{i}") for client in clients} == {str(outcomes.index("won")).encode()}
    clients[0].put("a", b"1")
    assert clients[1].get("a") == b"1"
    clients[1].delete(["a"])
    assert clients[0].stat("a") is None
    assert clients[0].list() == clients[1].list()
    for client in clients:
        client.close()


def test_a_client_that_is_cut_off(linked: tuple[list[Here], list[list[Link]]]) -> None:
    _, links = linked
    client = through(links[0])
    client.put("a", b"1")
    for link in links[0][:2]:
        link.sever()
    for call in (lambda: client.put("a", b"2"), lambda: client.get("a"), client.list):
        with pytest.raises(Unavailable, match="start"):
            call()
    # What failed may have reached a member: then it is taken over for good, or never was.
    found = through(links[1]).get("a")
    assert found in (b"1", b"2")
    assert {through(links[1]).get("a") for _ in range(3)} == {found}
    client.close()


def test_a_slow_node(linked: tuple[list[Here], list[list[Link]]], tmp_path: Path) -> None:
    """Reads are answered by another copy before it comes."""
    _, links = linked
    members = [{"url": link.address, "name": f"n{i}"} for i, link in enumerate(links[0])]
    client = quick(config_from_table("test", {"members": members, "redundancy": "3x", "deadline_seconds": 120.0}, "the test"))
    data = random_bytes(3_000_000)
    client.put("a", data)
    file = client.stat("a")
    assert file is not None
    assert file.layout is not None
    (piece,) = file.layout.stripes
    assert piece.fragments[0] is not None
    first = file.layout.objects[piece.fragments[0].object_index].member  # which is asked first
    got = bytearray(len(data))
    with client.open("a") as reader:  # its record is known: nothing else has found out that the first is slow
        links[0][int(first.removeprefix("n"))].seconds = 2.0  # for each 64 KiB: 90 seconds for all of it
        began = time.monotonic()
        reader.read_into(0, memoryview(got))
        assert time.monotonic() - began < 60, "the first alone takes longer"
    assert got == data
    for _ in range(3):
        assert client.get("a") == data
    assert time.monotonic() - began < 80
    client.close()


def test_rubbish(tmp_path: Path) -> None:
    """A member that answers anything at all: passed over, with its name."""
    nodes = [Here(tmp_path / f"n{i}") for i in range(3)]
    address, listener = garbage()
    members = [{"url": node.address, "name": f"n{i}"} for i, node in enumerate(nodes)]
    table: dict[str, Any] = {"members": members, "redundancy": "2x", "deadline_seconds": 2.0}
    first = Namespace(config_from_table("test", table, "the test"))
    first.put("a", OLD)
    broken = quick(config_from_table("test", {**table, "members": [{"url": address, "name": "n0"}, *members[1:]]}, "the test"))
    assert broken.get("a") == OLD
    broken.put("b", NEW)
    assert first.get("b") == NEW
    with pytest.raises(StoreError, match=address):
        broken.open_members["n0"].info()
    listener.close()
    for each in (first, broken, *nodes):
        each.close()


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
