"""Nodes and clients of one host are killed, stopped and cut off while bytes are passed through file descriptors."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.network_namespaces import hosts_on_a_wire
from helpers.node_fixtures import DATA, bytes_by_way, files, open_objects
from helpers.node_fixtures import local_node as local_node
from helpers.node_fixtures import node as node
from helpers.nodes import LocalNode, NodeProcess
from helpers.processes import until

import ckpt
from ckpt.storage.base.errors import NoSpace, NotFound, StoreError, Unavailable
from ckpt.storage.node import fd_passing_server
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import read_range, write_object

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets of abstract names are Linux's")


def test_a_client_in_another_network_namespace_uses_the_network(tmp_path: Path) -> None:
    with hosts_on_a_wire(1) as hosts:
        address = f"{hosts.address(0)}:7070"
        process = hosts.run(
            0, sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "data"), "--listen", address, "--insecure",
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        assert any("serving" in line for line in process.stderr)
        store = NodeStore(address, NodeCredentials(deadline_seconds=20))
        write_object(store, "a", DATA)
        assert store.get("a") == read_range(store, "a", 0, len(DATA)) == DATA
        counted = bytes_by_way(f"{hosts.address(0)}:8070")
        assert counted["received"] == len(DATA)
        assert "near" not in counted
        store.close()


def test_checkpoints_of_a_namespace_on_one_host_pass_descriptors(tmp_path: Path) -> None:
    """The steps are erasure-coded or copied; they are equal when two nodes are gone."""
    nodes = [NodeProcess(tmp_path / f"n{i}") for i in range(6)]
    state = {"w": np.arange(5 << 20, dtype=np.uint32), "b": np.arange(1000.0)}
    try:
        names = ",".join(node.address for node in nodes)
        for redundancy in ("4+2", "2x"):
            url = f"ckpt://{names}/run-{redundancy}?redundancy={redundancy}"
            ckpt.save(state, url, step=1, codec="none")
            found = ckpt.load(url)
            assert all(np.array_equal(found[key], value) for key, value in state.items())
        counted = [bytes_by_way(node) for node in nodes]
        # Manifests and records are small enough for a message.
        assert sum(c.get("near", 0) for c in counted) > 3.4 * (20 << 20)
        assert sum(c.get("received", 0) + c.get("sent", 0) for c in counted) == 0
        for node in nodes[:2]:
            node.kill()
        found = ckpt.load(f"ckpt://{names}/run-4+2?redundancy=4+2")
        assert all(np.array_equal(found[key], value) for key, value in state.items())
    finally:
        for node in nodes:
            node.close()


def test_a_client_reconnects_after_its_node_was_killed_in_a_write(node: NodeProcess) -> None:
    store = NodeStore(node.address, NodeCredentials(deadline_seconds=5))
    store.put("kept", b"1")
    writer = store.create("torn", 2 * len(DATA))
    writer.append(memoryview(DATA))
    node.kill()
    writer.append(memoryview(DATA))  # the file still exists for a process that has it open
    with pytest.raises(Unavailable):
        writer.commit()
    with pytest.raises(Unavailable):
        store.open("kept").read_into(0, memoryview(bytearray(1)))
    node.start()
    with pytest.raises(NotFound, match="write the object again"):
        writer.commit()
    writer.abort()
    assert [path.name for path in files(node.folder)] == ["kept"]
    deadline = time.monotonic() + 600
    while True:
        try:
            write_object(store, "torn", DATA)
            break
        except Unavailable:  # the connection retries only after a while
            assert time.monotonic() < deadline
    assert store.get("torn") == DATA
    assert bytes_by_way(node) == {"near": len(DATA)}, "the bytes are not passed by descriptors again"
    assert not open_objects()


def test_open_files_need_no_reply_of_a_stopped_node(node: NodeProcess) -> None:
    store = NodeStore(node.address, NodeCredentials(deadline_seconds=1))
    write_object(store, "a", DATA)
    reader, buffer = store.open("a"), memoryview(bytearray(len(DATA)))
    assert reader.read_into(0, buffer[:10]) == 10
    writer = store.create("b", len(DATA))
    node.signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match="within 1 s"):
        store.get("a")
    with pytest.raises(Unavailable):
        store.create("c")
    assert reader.read_into(0, buffer) == len(DATA), "a read of an open file needs the node"
    assert buffer == DATA
    writer.append(memoryview(DATA))
    with pytest.raises(Unavailable):
        writer.commit()
    node.signal(signal.SIGCONT)
    assert store.get("a") == DATA
    reader.close()
    writer.abort()
    assert not open_objects()


WRITER = """
import sys, time
from ckpt.storage.node.client import NodeStore
writer = NodeStore(sys.argv[1]).create("a", 8_000_000)
writer.append(memoryview(bytes(4_000_000)))
print("written", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_space_of_a_vanished_client_is_freed_after_its_lease(tmp_path: Path, number: int) -> None:
    """This also holds where the client still has the file open."""
    node = LocalNode(tmp_path / "data", NodeOptions(lease_seconds=1.0), capacity=10_000_000)
    client = subprocess.Popen([sys.executable, "-c", WRITER, node.address], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "written\n"
        client.send_signal(number)
        open_files = []
        if number == signal.SIGSTOP:
            open_files = [fd for fd in Path(f"/proc/{client.pid}/fd").iterdir() if "/objects/" in os.readlink(fd)]
            assert open_files
        store = NodeStore(node.address)
        deadline = time.monotonic() + 600
        while True:
            try:
                writer = store.create("b", 8_000_000)
                break
            except NoSpace:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with writer:
            # The file is emptied after its lease has ended.
            until(lambda: not any(os.stat(fd).st_blocks for fd in open_files), "a deleted file that is open takes no space")
            writer.append(memoryview(DATA))
            assert writer.commit() == len(DATA)
        assert [path.name for path in files(node.folder)] == ["b"]
    finally:
        client.kill()
        client.wait()
        node.close()


def test_a_client_renews_its_lease_while_it_writes(tmp_path: Path) -> None:
    node = LocalNode(tmp_path / "data")
    try:
        store = NodeStore(node.address)
        with store.create("a", 10 * len(DATA)) as writer:
            (upload,) = node.server.uploads._uploads.values()
            writer._renewed_at -= 100.0  # as if the last renewal were long ago
            upload.touched_at -= 50.0
            before = upload.touched_at
            writer.append(memoryview(DATA))
            assert upload.touched_at > before + 40.0
    finally:
        node.close()


def test_a_process_without_the_secret_gets_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    """It knows the name of the socket, which every process of the host can see, but not the secret."""
    node = LocalNode(tmp_path / "data")
    try:
        store = NodeStore(node.address, NodeCredentials(deadline_seconds=20))
        write_object(store, "a", DATA)
        assert store.get("a") == DATA
        address = store._fd_client._address
        assert address is not None
        with pytest.raises(ConnectionError):
            fd_passing_server.request_descriptors(replace(address, secret=secrets.token_bytes(32)), "open", "a", 5.0)
        for packet in (b"", b"x", secrets.token_bytes(100), address.secret, secrets.token_bytes(10_000)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(20)
                peer.connect(f"\0{address.socket_name}")
                peer.send(packet)
                assert socket.recv_fds(peer, 1000, 4)[:2] == (b"", [])
        for verb, argument in (("open", "../device.json"), ("open", "none"), ("append", "none"), ("other", "a")):
            with pytest.raises((StoreError, ValueError)):
                fd_passing_server.request_descriptors(address, verb, argument, 20.0)
        with ExitStack() as silent:
            for _ in range(20):
                peer = silent.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                peer.connect(f"\0{address.socket_name}")
            assert store.get("a") == DATA
        assert not open_objects()
    finally:
        node.close()


def test_a_process_that_takes_the_name_of_an_ended_node_gets_no_bytes(tmp_path: Path) -> None:
    """The client neither accepts bytes from it nor sends it any."""
    node = LocalNode(tmp_path / "data")
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "false").write_bytes(b"false")
    try:
        store = NodeStore(node.address)
        write_object(store, "a", DATA)
        door = store._fd_client._address
        assert door is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"ckpt-test-{secrets.token_hex(8)}"
            listener.bind(f"\0{name}")
            listener.listen()
            asked = []

            def answer() -> None:
                peer, _ = listener.accept()
                with peer, open(tmp_path / "objects" / "false", "r+b") as false:
                    asked.append(peer.recv(1000))
                    socket.send_fds(peer, [asked[0][:32] + b"\x92\x01\xc4\x00"], [false.fileno()])

            thread = threading.Thread(target=answer)
            thread.start()
            store._fd_client._address = replace(door, socket_name=name)
            assert store.get("a") == DATA
            thread.join()
            assert door.secret not in asked[0]
        assert not open_objects()
    finally:
        node.close()


def test_descriptors_are_not_inherited_by_child_processes(local_node: LocalNode) -> None:
    store = NodeStore(local_node.address)
    write_object(store, "a", DATA)
    fd = store.descriptor("a")
    assert fd is not None
    assert not os.get_inheritable(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
