"""The commands that scrub, repair and drain a namespace, and nodes that repair it by themselves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.nodes import LocalNode, NodeProcess
from helpers.processes import until
from helpers.whole_namespaces import require_whole

from ckpt.aggregator.cluster.etcd import list_members
from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.aggregator.maintenance import scrub
from ckpt.storage.base.errors import StoreError
from ckpt.storage.testing import random_bytes
from ckpt.tools.node import command


def admin(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ckpt.tools.node", "admin", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_status_and_repair_commands_show_the_health_of_a_namespace(tmp_path: Path) -> None:
    """The operator sees a whole namespace, a lost disk, the repair, a whole namespace again, and a member that is down."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(4)]
    try:
        url = f"ckpt://{','.join(node.address for node in nodes)}"
        namespace, _ = open_namespace(url)
        for i in range(4):
            namespace.put(f"f{i}", random_bytes(3_000_000, i))
        done = admin("status", url)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("serving") == 4
        assert "4 of 4 members answer; new files are written as 2x" in done.stdout
        done = admin("scrub", url)
        assert (done.returncode, "4 files, 12.0 MB" in done.stdout, "all whole" in done.stdout) == (0, True, True), done
        disk = next(tmp_path.glob("n*/objects"))  # of a node that has objects
        disk.rename(tmp_path / "lost")  # in one step: the node may be deleting a file below it
        disk.mkdir()
        done = admin("scrub", "--quick", url)
        assert done.returncode == 1
        assert "endangered, one more lost fragment destroys it" in done.stdout
        done = admin("scrub", "--json", url)
        assert not json.loads(done.stdout)["whole"]
        done = admin("repair", url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "made whole" in done.stdout
        assert "all whole now" in done.stdout
        assert admin("scrub", url).returncode == 0
        done = admin("drain", url, namespace.locations[3].name)
        assert (done.returncode, "new files still go to" in done.stdout) == (0, True), done
        nodes[3].kill()
        done = admin("status", url)
        assert done.returncode == 1
        assert "3 of 4 members answer" in done.stdout
        for i in range(4):
            assert namespace.get(f"f{i}") == random_bytes(3_000_000, i)
        done = admin("status", "ckpt://nowhere/")
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1
    finally:
        for node in nodes:
            node.close()


def test_a_scrub_names_each_member_with_damaged_objects_of_a_file_once(tmp_path: Path) -> None:
    """Each append to a file adds an object on each of the two members."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(2)]
    try:
        url = f"ckpt://{','.join(node.address for node in nodes)}"
        namespace, _ = open_namespace(url)
        file = namespace.put("f", random_bytes(100_000, 0))
        for i in (1, 2):
            with namespace.create("f", aligned=False, base=file) as writer:
                writer.append(memoryview(random_bytes(100_000, i)))
                file = writer.publish()
        objects = {node.address: [p for p in (node.folder / "objects").rglob("*") if p.is_file()] for node in nodes}
        for number, node in enumerate(nodes):
            assert len(objects[node.address]) == 3, "each append adds an object"
            for path in objects[node.address][number:2]:  # two objects on the first member, and one on the second
                raw = bytearray(path.read_bytes())
                raw[len(raw) // 2] ^= 1
                path.write_bytes(raw)
        done = admin("scrub", url)
        namespace.close()
        assert done.returncode == 1, done
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("f: ")]
        for clause in (f"; 2 damaged objects on {nodes[0].address}", f"; 1 damaged object on {nodes[1].address}"):
            assert line.count(clause) == 1, line
        assert line.count(";") == 2, line
    finally:
        for node in nodes:
            node.close()


def test_a_scrub_and_a_repair_report_what_they_could_not_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member fails to read its objects, as a disk does for a moment. The progress bar knows the total."""
    members = ", ".join(f'{{ url = "{tmp_path}/disk{i}", name = "disk{i}" }}' for i in range(2))
    (tmp_path / "config.toml").write_text(f"[namespaces.lab]\nmembers = [{members}]\n")
    for name, value in (("CKPT_CONFIG", str(tmp_path / "config.toml")), ("FORCE_COLOR", "1"), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)
    namespace, _ = open_namespace("ckpt://lab")  # the one that the commands use in this process
    for i in range(2):
        namespace.put(f"f{i}", random_bytes(100_000, i))
    namespace.settle(["/f0", "/f1"])

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(command, ["admin", *arguments, "ckpt://lab"], standalone_mode=False)
        assert done.exception is None, done.output
        return done.return_value, done.output

    for name in ("scrub", "repair"):
        status, output = run(name)
        assert status == 0, output
        totals = {float(text) for text in re.findall(r"[\d.]+/([\d.]+) kB", output)}
        assert max(totals, default=0) == 400, output

    def fail(*_: object) -> None:
        raise StoreError("the disk does not read")

    monkeypatch.setattr(namespace.open_members["disk1"], "verify", fail)
    for name, verdict in (("scrub", "200.0 kB could not be checked"), ("repair", "; not all whole yet")):
        status, output = run(name)
        assert (status, verdict in output) == (1, True), output
    monkeypatch.undo()
    namespace.close()


def test_one_node_at_a_time_repairs_the_namespace(tmp_path: Path) -> None:
    """It restores a lost disk by itself; when it dies, another node continues."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(4)]
    url = f"ckpt://{','.join(node.address for node in nodes)}"
    namespace, _ = open_namespace(url)
    for i in range(24):  # so that each node has some
        namespace.put(f"f{i}", random_bytes(100_000, i))
    repair_nodes = [
        NodeProcess(tmp_path / f"c{i}", "--repair", url, "--repair-every", "0.3", failpoints="") for i in range(2)
    ]  # not members of the namespace: they only repair it
    try:
        for victim in (0, 1):
            for path in (tmp_path / f"n{victim}" / "objects").rglob("*"):
                if path.is_file():
                    path.unlink()
            deadline = time.monotonic() + 600
            while not scrub.scrub_namespace(namespace).is_whole and time.monotonic() < deadline:
                time.sleep(0.2)
            require_whole(namespace, verify=True)
            at_work = [c for c in repair_nodes if any(": repaired " in line for line in c.log)]
            assert len(at_work) == 1 + victim, "two nodes repair at the same time"
            if not victim:
                at_work[0].kill()
        for i in range(24):
            assert namespace.get(f"f{i}") == random_bytes(100_000, i)
    finally:
        for node in (*nodes, *repair_nodes):
            node.close()


@needs_etcd
def test_the_first_nodes_of_a_cluster_repair_it_if_etcd_starts_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power cut. At first no node is announced, and then fewer than the redundancy needs."""
    etcd = EtcdProcess(tmp_path / "etcd")
    url = f"{etcd.endpoint.replace('http', 'etcd')}/lab"
    (tmp_path / "config.toml").write_text(f'[namespaces.lab]\nmembers = "{url}"\n')
    monkeypatch.setenv("CKPT_CONFIG", str(tmp_path / "config.toml"))
    options = ["--repair", "ckpt://lab", "--repair-every", "0.5", "--etcd", etcd.endpoint, "--cluster", "lab"]
    nodes: list[NodeProcess] = []
    try:
        nodes.append(NodeProcess(tmp_path / "n0", *options))
        until(lambda: "the background repair failed, and is tried again: etcd does not answer" in "".join(nodes[0].log))
        etcd.start()
        until(lambda: "needs 2 members, there are 1" in "".join(nodes[0].log))
        nodes += [NodeProcess(tmp_path / f"n{i}", *options) for i in (1, 2)]
        until(lambda: len(list_members(etcd.endpoints, "lab")) == 3)
        namespace, _ = open_namespace("ckpt://lab")
        namespace.put("a", random_bytes(100_000, 1))
        until(lambda: any("ckpt://lab is whole: 1 files" in line for node in nodes for line in node.log), "a repair")
        assert [node.process.poll() for node in nodes] == [None] * 3
    finally:
        for node in nodes:
            node.close()
        etcd.kill()
