"""Clients and nodes of a namespace are killed and stopped at every fail point."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.forked_python import ForkedPython
from helpers.namespace_files import NEW, OLD
from helpers.nodes import NodeProcess, directories, nodes_config, quick
from helpers.processes import SOAK
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.testing import random_bytes

CLIENT = """
import sys
from pathlib import Path
from helpers.nodes import directories
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


@pytest.fixture(scope="module")
def client() -> Iterator[ForkedPython]:
    with ForkedPython("helpers.nodes", "ckpt.aggregator.file_io.namespace", "ckpt.storage.testing") as forked:
        yield forked


POINTS = [
    "namespace.append", "namespace.append@2", "local.append@2", "local.fsync", "local.rename", "namespace.commit",
    "namespace.record", "register.change", "register.changed", "registers.commit", "registers.commit@2", "registers.committed",
    "registers.committed@2", "registers.committed@3", "namespace.recorded", "namespace.rename", "namespace.renamed",
    "register.prepare", "register.accept", "register.accepted", "local.delete",
]  # fmt: skip


@pytest.mark.parametrize("redundancy", ["2x", "3+2"])
@pytest.mark.parametrize("what", ["put", "new", "delete", "rename"])
@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS if SOAK else POINTS[::2])
def test_a_killed_client_leaves_the_old_or_the_new_files(
    client: ForkedPython, tmp_path: Path, what: str, point: str, redundancy: str
) -> None:
    """The files are whole, either as they were or as the client wanted them, never a mixture. The next client works, and no
    object is left over."""
    config = directories(tmp_path, 5, redundancy=redundancy)
    namespace = Namespace(config)
    namespace.put("a", OLD)
    namespace.close()
    name, _, at = point.partition("@")
    code = client.run(CLIENT, tmp_path, what, redundancy, failpoints=f"{name}=kill@{at or 1}")
    assert code in (0, -9)
    namespace = Namespace(config)
    contents = {path: namespace.get(path) for path in namespace.list()}
    if what == "put":
        assert contents in ({"a": OLD}, {"a": NEW}), point
        assert code or contents == {"a": NEW}
    elif what == "new":
        assert contents in ({"a": OLD}, {"a": OLD, "b": NEW}), point
        assert code or "b" in contents
    elif what == "delete":
        assert contents in ({"a": OLD}, {}), point
        assert code or not contents
    else:
        assert contents in ({"a": OLD}, {"a": OLD, "b": OLD}, {"b": OLD}), point
        assert code or contents == {"b": OLD}
    for path in ("a", "b", "c"):
        namespace.put(path, NEW)
    namespace.delete(["b"])
    assert {path: namespace.get(path) for path in namespace.list()} == {"a": NEW, "c": NEW}
    grace, scrub.GRACE_SECONDS = scrub.GRACE_SECONDS, -60.0
    try:
        repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
        require_whole(namespace, verify=True)
    finally:
        scrub.GRACE_SECONDS = grace
    assert {path: namespace.get(path) for path in namespace.list()} == {"a": NEW, "c": NEW}
    object_count = sum(len([p for p in (tmp_path / f"disk{i}" / "objects").rglob("*") if p.is_file()]) for i in range(5))
    file = namespace.stat("a")
    other = namespace.stat("c")
    assert file is not None
    assert file.layout is not None
    assert other is not None
    assert other.layout is not None
    assert object_count == len(file.layout.objects) + len(other.layout.objects), "an object is left that no record names"
    namespace.close()


NODE_POINTS = [
    "node.append@2", "node.commit", "node.committed", "registers.commit@4", "registers.committed@5", "local.fsync@5",
    "node.get@2",
]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("point", NODE_POINTS)
def test_acknowledged_files_survive_killed_nodes(tmp_path: Path, point: str, number: int) -> None:
    check_files_survive_failing_nodes(tmp_path, point, number, "kill")


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2] if SOAK else [1])
@pytest.mark.parametrize("point", NODE_POINTS if SOAK else ["node.append@2"])
def test_acknowledged_files_survive_stopped_nodes(tmp_path: Path, point: str, number: int) -> None:
    check_files_survive_failing_nodes(tmp_path, point, number, "stop")


def check_files_survive_failing_nodes(tmp_path: Path, point: str, number: int, action: str) -> None:
    """Check that acknowledged files are readable while nodes fail and after their return.

    number: how many nodes fail, at most as many as the redundancy tolerates.
    """
    redundancy, count = ("2x", 4) if number == 1 else ("3+2", 7)
    name, _, at = point.partition("@")
    wire = [] if action == "kill" else ["--no-fd-passing"]
    points = [f"{name}={action}@{at or 1}" if i < number else "" for i in range(count)]
    nodes = [NodeProcess(tmp_path / f"n{i}", *wire, failpoints=point) for i, point in enumerate(points)]
    namespace = quick(nodes_config(nodes, redundancy=redundancy, deadline_seconds=5.0 if action == "kill" else 3.0))
    try:
        acknowledged: dict[str, bytes] = {}
        for i in range(6):
            data = random_bytes([100, 50_000, 3_000_000][i % 3], i)
            try:
                namespace.put(f"f{i}", data)
                acknowledged[f"f{i}"] = data
            except Unavailable:
                assert i == 0, "only the creation of the namespace needs all nodes"
        for path, data in acknowledged.items():
            assert namespace.get(path) == data
        assert acknowledged
        for node in nodes[:number]:
            if node.stopped():
                node.kill()
            if node.process.poll() is not None:
                node._failpoints = ""
                node.start()
        fresh = quick(nodes_config(nodes, redundancy=redundancy, deadline_seconds=5.0))
        for path, data in acknowledged.items():
            assert fresh.get(path) == data
        assert not repair.repair_namespace(fresh, scrub.scrub_namespace(fresh, verify=True)).failed
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
def test_the_next_repair_completes_one_during_which_a_node_failed(tmp_path: Path, point: str, action: str) -> None:
    """One disk is lost, and another node fails during the repair: all files stay readable, and the next repair completes it.
    Both are nodes with the most objects."""
    name, _, at = point.partition("@")
    nodes = [NodeProcess(tmp_path / f"n{i}", "--no-fd-passing") for i in range(5)]
    namespace = quick(nodes_config(nodes, redundancy="3x", deadline_seconds=3.0))
    try:
        acknowledged = {f"f{i}": random_bytes([50_000, 3_000_000][i % 2], i) for i in range(4)}
        for path, data in acknowledged.items():
            namespace.put(path, data)
        namespace.settle([f"/{path}" for path in acknowledged])
        namespace.close()
        objects = [tmp_path / f"n{i}" / "objects" for i in range(5)]
        lost, other = sorted(range(5), key=lambda i: -sum(1 for _ in objects[i].rglob("*")))[:2]
        shutil.rmtree(objects[lost])
        failing = nodes[other]
        failing.kill()
        failing._failpoints = f"{name}={action}@{at or 1}"
        failing.start()
        namespace = quick(nodes_config(nodes, redundancy="3x", deadline_seconds=3.0))
        with suppress(StoreError):  # the repair fails as a whole where it needs the node for more than its fragments
            repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
        for path, data in acknowledged.items():
            assert namespace.get(path) == data
        failing.kill()
        failing._failpoints = ""
        failing.start()
        fresh = quick(nodes_config(nodes, redundancy="3x"))
        assert not repair.repair_namespace(fresh, scrub.scrub_namespace(fresh, verify=True)).failed
        found = scrub.scrub_namespace(fresh, verify=True)
        assert not found.damaged_files
        assert not found.missing_members
        for path, data in acknowledged.items():
            assert fresh.get(path) == data
        fresh.close()
    finally:
        namespace.close()
        for node in nodes:
            node.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_acknowledged_files_survive_two_node_failures_at_random_moments(tmp_path: Path, number: int) -> None:
    """With redundancy 4+2, two nodes fail while files are written and read; every acknowledged file is readable."""
    seed = int(os.environ.get("CKPT_SEED", random.randrange(10**6)))
    print("seed", seed)
    draw = random.Random(seed)
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(8)]
    namespace = quick(nodes_config(nodes, redundancy="4+2", deadline_seconds=2.0))
    acknowledged: dict[str, bytes] = {}
    try:
        namespace.put("first", b"all nodes answer once")
        stop = threading.Event()

        def fail_two_nodes() -> None:
            for node in draw.sample(nodes, 2):
                time.sleep(draw.uniform(0.0, 0.6))
                node.signal(number)
            stop.set()

        thread = threading.Thread(target=fail_two_nodes)
        thread.start()
        after = 0
        for i in itertools.count():
            data = random_bytes(draw.choice([100, 40_000, 2_000_000]), i)
            namespace.put(f"f{i}", data)
            acknowledged[f"f{i}"] = data
            path = draw.choice(list(acknowledged))
            assert namespace.get(path) == acknowledged[path], (seed, path)
            after += stop.is_set()
            if after > 4:
                break
        thread.join()
        for path, data in acknowledged.items():
            assert namespace.get(path) == data, (seed, path)
        assert set(namespace.list()) == {"first", *acknowledged}
    finally:
        namespace.close()
        for node in nodes:
            node.close()
