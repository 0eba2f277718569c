"""Members through etcd: a real server, started, killed and started again, with nodes as users start them."""

from __future__ import annotations

import http.server
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.etcd_members import FACTS, configure_namespace
from helpers.etcd_server import EtcdProcess, needs_etcd, running_etcd  # noqa: F401  a fixture
from helpers.nodes import NodeProcess
from helpers.processes import until

from ckpt.aggregator.cluster import config, etcd
from ckpt.aggregator.cluster.etcd import AnnouncedNode, Announcement, announce
from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.storage.base.errors import InvalidArgument, StoreError, Unavailable


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    made: list[NodeProcess] = []

    def start(name: str, *options: str) -> NodeProcess:
        made.append(NodeProcess(tmp_path / name, *options))
        return made[-1]

    yield start
    for node in made:
        node.close()


@needs_etcd
def test_a_member_is_listed_as_up_while_it_is_announced(server: EtcdProcess) -> None:
    assert server.up() == {}
    with closing(announce(server.endpoints, "lab", FACTS.address, FACTS)):
        assert etcd.list_members(server.endpoints, "lab") == (etcd.ClusterMember("127.0.0.1:7070", FACTS, True),)
        assert server.up("lab2") == {}, "a member of one cluster is listed in another"
    assert etcd.list_members(server.endpoints, "lab") == (etcd.ClusterMember("127.0.0.1:7070", FACTS, False),), (
        "the member is not known any more"
    )


@needs_etcd
def test_a_member_announces_itself_again_after_a_lost_lease(server: EtcdProcess) -> None:
    with closing(announce(server.endpoints, "lab", FACTS.address, FACTS, lease_seconds=2)) as announced:
        lost = announced.lease
        assert lost is not None
        EtcdClient(server.endpoints).revoke_lease(lost)
        assert server.up() == {FACTS.address: False}
        until(lambda: server.up()[FACTS.address] and announced.lease is not None)
        assert announced.lease not in (None, lost)
        time.sleep(6)
        assert server.up() == {FACTS.address: True}, "the new lease is not kept alive"


@needs_etcd
@pytest.mark.parametrize("forgets", [False, True])
def test_members_are_announced_again_after_etcd_is_restarted(
    server: EtcdProcess, caplog: pytest.LogCaptureFixture, forgets: bool
) -> None:
    with (
        caplog.at_level(logging.INFO, "ckpt"),
        closing(announce(server.endpoints, "lab", FACTS.address, FACTS, lease_seconds=2)),
    ):
        server.kill()
        until(lambda: "keep trying" in caplog.text)
        with pytest.raises(Unavailable, match="etcd does not answer"):
            server.up()
        time.sleep(2)
        if forgets:
            shutil.rmtree(server.folder)
        server.start()
        until(lambda: server.up() == {FACTS.address: True})
        until(lambda: "announced 127.0.0.1:7070 in cluster lab" in caplog.text)
        time.sleep(5)
        assert server.up() == {FACTS.address: True}
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1, "the warning is not logged exactly once"
    assert server.up() == {FACTS.address: False}


@needs_etcd
def test_a_node_is_announced_when_etcd_starts_after_it(tmp_path: Path) -> None:
    server = EtcdProcess(tmp_path / "etcd")
    with closing(announce(server.endpoints, "lab", FACTS.address, FACTS, lease_seconds=2)) as announced:
        assert announced.lease is None
        server.start()
        try:
            until(lambda: server.up() == {FACTS.address: True})
        finally:
            server.kill()
        began = time.monotonic()
    assert time.monotonic() - began < 3, "the end waits for an etcd that has ended"


@needs_etcd
def test_a_second_node_with_the_name_of_another_is_refused(server: EtcdProcess) -> None:
    other = AnnouncedNode(FACTS.address, device="disk-2")
    with closing(announce(server.endpoints, "lab", FACTS.address, FACTS)):
        with pytest.raises(InvalidArgument, match="is another node"):
            announce(server.endpoints, "lab", FACTS.address, other)
        same = announce(server.endpoints, "lab", FACTS.address, FACTS)  # the same node, restarted before its lease has expired
        with closing(same):
            assert server.up() == {FACTS.address: True}
    with closing(announce(server.endpoints, "lab", FACTS.address, other)):
        assert etcd.list_members(server.endpoints, "lab")[0].node == other, "a new device does not replace the earlier one"


@needs_etcd
def test_endpoints_are_tried_in_turn(server: EtcdProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = ("http://127.0.0.1:1", f"http://127.0.0.1:{silent.getsockname()[1]}", server.endpoint)
        client = EtcdClient(endpoints, deadline_seconds=3)
        client.grant_lease(10)
        began = time.monotonic()
        client.grant_lease(10)
        assert time.monotonic() - began < 1, "the endpoint that answered is not asked first"
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"127.0.0.1:1: Connection refused.*timed out"):
            EtcdClient(endpoints[:2], deadline_seconds=1).grant_lease(10)
        assert time.monotonic() - began < 3


@needs_etcd
def test_a_malformed_announcement_is_ignored(server: EtcdProcess, caplog: pytest.LogCaptureFixture) -> None:
    client = EtcdClient(server.endpoints)
    client.put("/ckpt/lab/known/h:2", b'{"address": "h:2", "added_later": [1]}')
    values = ("", "[]", "{}", '{"address": "/etc"}', '{"address": 5}', '{"address": "h:1", "weight": ""}', "[" * 100_000)
    for value in values:
        client.put("/ckpt/lab/known/h:1", value.encode())
        assert server.up() == {"h:2": False}
    assert caplog.text.count("/ckpt/lab/known/h:1 in etcd can't be read, and is skipped") == len(values)
    client.put("/ckpt/lab/known/h:1", b'{"address": "h:1"}')
    client.put("/ckpt/lab/members/h:1", b"?")
    assert server.up() == {"h:1": True, "h:2": False}, "the earlier announcement does not count"
    with closing(announce(server.endpoints, "lab", "h:1", AnnouncedNode("h:1"))):
        assert etcd.list_members(server.endpoints, "lab")[0].node == AnnouncedNode("h:1"), "the node has not written it again"


@pytest.mark.parametrize(("status", "text"), [(404, "Not Found"), (200, "<html>"), (200, "[]"), (400, "{}")])
def test_a_server_that_is_not_etcd_is_reported(status: int, text: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(StoreError, match="not an answer of etcd; give the client port"):
            etcd.list_members((f"http://127.0.0.1:{other.server_port}",), "lab")
        other.shutdown()


@needs_etcd
def test_etcd_without_a_quorum_is_reported_as_unavailable(tmp_path: Path) -> None:
    first, second = EtcdProcess(tmp_path / "e0"), EtcdProcess(tmp_path / "e1")
    first.peers = second.peers = f"{first.name}={first.peer},{second.name}={second.peer}"
    try:
        second.start(wait=False)
        first.start()
        with closing(announce(first.endpoints, "lab", FACTS.address, FACTS, lease_seconds=3)):
            second.kill()
            time.sleep(4)
            client = EtcdClient(first.endpoints, 15)
            for call in (lambda: client.grant_lease(10), lambda: client.keep_lease_alive(1)):  # a get waits even longer
                with pytest.raises(Unavailable, match=r"127.0.0.1:\d+: etcdserver: |127.0.0.1:\d+: context deadline exceeded"):
                    call()
            second.start()
            until(lambda: first.up() == {FACTS.address: True})
    finally:
        first.kill()
        second.kill()


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:2")
    with pytest.raises(Unavailable, match=r"\(http://127.0.0.1:1: Connection refused\)"):
        etcd.list_members(("http://127.0.0.1:1",), "lab")


@pytest.mark.parametrize(
    "url", ["etcd://", "etcd:///lab", "etcd://h:1", "etcd://h/lab", "etcd://h:1/", "etcd://h:1/a/b", "http://h:1/lab", "h:1"]
)
def test_a_malformed_etcd_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(InvalidArgument):
        config.config_from_table("lab", {"members": url}, "the test")


@needs_etcd
def test_a_namespace_through_etcd_survives_killed_nodes(
    server: EtcdProcess, nodes: Callable[..., NodeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = server.endpoint.removeprefix("http://")
    configure_namespace(tmp_path, monkeypatch, hosts)
    with pytest.raises(Unavailable, match="no node has announced itself"):
        open_namespace("ckpt://lab/")
    options = ("--etcd", server.endpoint, "--cluster", "lab")
    every = [nodes("node0", *options)]
    with pytest.raises(Unavailable, match="needs 2 members, there are 1"):
        open_namespace("ckpt://lab/")
    every += [nodes(f"node{i}", *options, "--domain", f"rack=r{i},host=h{i}") for i in (1, 2, 3)]
    assert server.up() == {node.address: True for node in every}, "a node serves and is not announced"

    namespace, _ = open_namespace("ckpt://lab/")
    assert namespace.open_members[every[1].address].member.location.domain == ("r1", "h1")
    data = os.urandom(3 << 20)
    for i in range(6):
        namespace.put(f"a{i}", data)
    killed, stopped = every[1], every[2]
    killed.kill()
    assert [namespace.get(f"a{i}") == data for i in range(6)] == [True] * 6
    namespace.put("b", data)

    stopped.signal(signal.SIGSTOP)
    until(lambda: server.up() == {node.address: node not in (killed, stopped) for node in every})
    stopped.signal(signal.SIGCONT)
    until(lambda: server.up()[stopped.address])
    again, _ = open_namespace("ckpt://lab/")
    assert again is namespace, "the namespace was opened again, although its members are the same"
    assert again.get("b") == data

    every[3].signal(signal.SIGTERM)
    assert every[3].process.wait(600) == 0
    assert server.up()[every[3].address] is False

    killed.start()
    assert server.up()[killed.address]
    server.kill()
    assert open_namespace("ckpt://lab/")[0] is namespace, "a client that knew the members was opened again"
    assert namespace.get("a0") == data
    every[0].signal(signal.SIGTERM)
    assert every[0].process.wait(600) == 0, "a node does not end without etcd"


@needs_etcd
def test_another_process_opens_a_namespace_through_etcd(
    server: EtcdProcess, nodes: Callable[..., NodeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_namespace(tmp_path, monkeypatch, server.endpoint.removeprefix("http://"))
    every = [nodes(f"node{i}", "--etcd", server.endpoint, "--cluster", "lab") for i in range(2)]
    done = admin_status()
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert {m["member"]: m["state"] for m in listed["members"]} == {node.address: "serving" for node in every}
    assert listed["redundancy"] == "2x"


@needs_etcd
def test_clients_continue_after_a_node_is_forgotten(
    server: EtcdProcess, nodes: Callable[..., NodeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that opened the namespace before continues, with a node that arrived later; a client that opens it afterwards
    finds three nodes."""
    configure_namespace(tmp_path, monkeypatch, server.endpoint.removeprefix("http://"))
    announced = ("--etcd", server.endpoint, "--cluster", "lab")
    every = [nodes(f"node{i}", *announced) for i in range(3)]
    namespace, _ = open_namespace("ckpt://lab/")
    data = os.urandom(300_000)
    namespace.put("a", data)
    every.append(nodes("node3", *announced))
    every[1].kill()
    done = admin("forget", "ckpt://lab", every[1].address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert every[1].address not in server.up()
    namespace.put("b", data)
    assert set(namespace.ring.all_members) == {every[i].address for i in (0, 2, 3)}
    listed = json.loads(admin("status", "--json", "ckpt://lab").stdout)
    assert {m["member"]: m["state"] for m in listed["members"]} == {every[i].address: "serving" for i in (0, 2, 3)}
    every[2].kill()
    assert namespace.get("a") == namespace.get("b") == data


def admin_status() -> subprocess.CompletedProcess[str]:
    return admin("status", "--json", "ckpt://lab")


def admin(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt.tools.node", "admin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_an_unreachable_etcd_is_reported_in_one_line(
    nodes: Callable[..., NodeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_namespace(tmp_path, monkeypatch, "127.0.0.1:1,127.0.0.1:2")
    done = admin_status()
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    refused = "http://127.0.0.1:1: Connection refused; http://127.0.0.1:2: Connection refused"
    assert f"etcd does not answer ({refused})" in done.stderr

    node = nodes("node", "--etcd", "http://127.0.0.1:1", "--cluster", "lab")
    warned = [line for line in node.log if "WARNING" in line]
    assert len(warned) == 1
    assert f"can't announce {node.address} in cluster lab, and keep trying" in warned[0]
    node.signal(signal.SIGTERM)
    assert node.process.wait(600) == 0


@needs_etcd
def test_a_node_command_with_the_name_of_another_node_is_refused(server: EtcdProcess, tmp_path: Path) -> None:
    with closing(announce(server.endpoints, "lab", FACTS.address, FACTS)):
        command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "node"), "--listen", "127.0.0.1:0",
                   "--etcd", server.endpoint, "--cluster", "lab", "--advertise", FACTS.address]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "is another node (device disk-1)" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--etcd", "http://h:2379"], "--etcd needs --cluster"),
        (["--cluster", "lab"], "need --etcd"),
        (["--advertise", "h:1"], "need --etcd"),
        (["--etcd", "ftp://h:1", "--cluster", "lab"], "is not an endpoint of etcd"),
        (["--etcd", "", "--cluster", "lab"], "is not an endpoint of etcd"),
        (["--etcd", "h:1", "--cluster", "a/b"], "can't name a cluster"),
        (["--etcd", "h:1", "--cluster", "lab", "--advertise", "h"], "write HOST:PORT"),
        (["--etcd", "h:1", "--cluster", "lab", "--advertise", "h:0"], "add the port, which clients need"),
        (["--etcd", "h:1", "--cluster", "lab", "--advertise", "a/b:7"], "is not an address of a node"),
        (["--etcd", "h:1", "--cluster", "lab", "--listen", "0.0.0.0:7070", "--insecure"], "give --advertise"),
    ],
)
def test_wrong_options_of_etcd_are_refused_with_advice(tmp_path: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", "d", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_announcement_can_be_closed_while_it_retries() -> None:
    announced: Announcement = announce(("http://127.0.0.1:1",), "lab", FACTS.address, FACTS, lease_seconds=3)
    announced.close()
    assert not announced._thread.is_alive()
