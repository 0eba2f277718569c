"""A storage node in this process: it refuses wrong tokens, wrong names, oversized and malformed messages."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from helpers.node_fixtures import DATA, open_objects_now
from helpers.node_fixtures import local_node as local_node
from helpers.node_fixtures import store as store
from helpers.nodes import LocalNode

from ckpt.storage.base.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidArgument,
    InvalidName,
    NoSpace,
    NotFound,
    Refused,
    Unavailable,
)
from ckpt.storage.member import device
from ckpt.storage.member.device import Device
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.registers.base import RegisterValue
from ckpt.storage.testing import random_bytes, write_object


def test_a_wrong_token_is_refused_by_every_call(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, NodeOptions(tokens=lambda: ("the right one, long enough",)))
    try:
        NodeStore(node.address, NodeCredentials(token="the right one, long enough")).put("a", b"1")
        for access in (NodeCredentials(), NodeCredentials(token="a wrong one"), NodeCredentials(token="")):
            store = NodeStore(node.address, access)
            for verb, arguments in (
                ("put", ["b", b"2", False]), ("list", [""]), ("delete", [["a"]]), ("registers.read", [["x"]]),
                ("create", ["c", 0]),
            ):  # fmt: skip
                with pytest.raises(Refused, match="wrong or missing token"):
                    store.call(verb, *arguments)
            with pytest.raises(Refused, match="wrong or missing token"):
                store.get("a")
        assert (tmp_path / "objects" / "a").read_bytes() == b"1"
        assert not (tmp_path / "objects" / "b").exists()
    finally:
        node.close()


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "a//b", ".hidden", "x" * 300, "a\x00b"])
def test_names_that_leave_the_root_are_refused(local_node: LocalNode, store: NodeStore, name: str) -> None:
    for verb, arguments in (("put", [name, b"1", False]), ("create", [name, 0]), ("delete", [[name]]), ("exists", [name])):
        with pytest.raises(InvalidName, match="not a valid object name"):
            store.call(verb, *arguments)
    with pytest.raises(InvalidName):
        list(store.read(name, 0, 10))
    assert sorted(p.name for p in local_node.folder.iterdir()) == ["device.json", "lock"]


def test_a_symbolic_link_out_of_the_root_is_not_followed(local_node: LocalNode, store: NodeStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    store.put("a", b"1")
    (local_node.folder / "objects" / "out").symlink_to(secret)
    (local_node.folder / "objects" / "key").symlink_to(secret / "key")
    for name in ("out/key", "key"):
        with pytest.raises(InvalidName, match="symbolic link"):
            store.get(name)
        with pytest.raises(InvalidName, match="symbolic link"):
            store.put(name, b"overwritten")
        with pytest.raises(InvalidName, match="symbolic link"):
            store.delete([name])
    assert (secret / "key").read_bytes() == b"secret"


def test_an_oversized_message_is_refused(store: NodeStore) -> None:
    key = store.call("create", "a", 0)
    descriptor = flight.FlightDescriptor.for_command(wire.pack([key, wire.MESSAGE_BYTES + 1, b""]))
    with pytest.raises(InvalidArgument, match="is refused"), store.convert_flight_errors("test"):
        writer, reader = store.next_connection().do_put(descriptor, wire.SCHEMA, store.call_options())
        writer.done_writing()
        reader.read()
        writer.close()


def test_malformed_messages_are_refused_and_the_node_continues(local_node: LocalNode, store: NodeStore) -> None:
    with store.convert_flight_errors("test"):
        client = store.next_connection()
    garbage = [("list", wire.pack([5]))]
    garbage += [("put", b"\xc1\xff"), ("put", b""), ("put", wire.pack([1])), ("no", b""), ("registers.read", wire.pack([5]))]
    for verb, body in garbage:
        with pytest.raises(InvalidArgument), store.convert_flight_errors("test"):
            list(client.do_action(flight.Action(verb, body), store.call_options()))
    tickets = [b"\xc1", wire.pack([1]), wire.pack(["a", "x", 3]), wire.pack(["a", -5, 3]), wire.pack([None, 0, 1])]
    store.put("a", b"123")
    for ticket in tickets:
        with pytest.raises(InvalidArgument), store.convert_flight_errors("test"):
            list(client.do_get(flight.Ticket(ticket), store.call_options()))
    key = store.call("create", "b", 0)
    text = pa.record_batch([["hello"]], names=["s"])
    good = wire.to_record_batch(memoryview(b"hello"))
    wrong = [(b"", good), (wire.pack([1]), good), (wire.pack([key, "x", b""]), good), (wire.pack([key, 5, b""]), text)]
    for command, batch in wrong:
        with pytest.raises(InvalidArgument), store.convert_flight_errors("test"):
            writer, reader = client.do_put(flight.FlightDescriptor.for_command(command), batch.schema, store.call_options())
            with suppress(pa.ArrowException):  # the node may refuse the stream earlier
                writer.write_batch(batch)
                writer.done_writing()
                reader.read()
            writer.close()
    with pytest.raises(InvalidArgument):
        store.call("create", "c", -(1 << 60))
    assert store.info().state == "serving"


def test_an_append_that_was_damaged_in_transit_is_refused(store: NodeStore) -> None:
    key = store.call("create", "a", 0)
    descriptor = flight.FlightDescriptor.for_command(wire.pack([key, 5, b"0" * 16]))
    with pytest.raises(IntegrityError, match="send the append again"), store.convert_flight_errors("test"):
        writer, reader = store.next_connection().do_put(descriptor, wire.SCHEMA, store.call_options())
        writer.write_batch(wire.to_record_batch(memoryview(b"hello")))
        writer.done_writing()
        reader.read()
        writer.close()
    assert store.append(key, memoryview(b"hello")) == 0, "the upload continues"
    assert store.call("commit", key) == 5


def test_a_full_node_raises_no_space(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, capacity=10_000_000)
    try:
        store = NodeStore(node.address)
        assert store.info().free_bytes == 10_000_000
        with pytest.raises(NoSpace, match="does not fit: 10000000 bytes are free"):
            store.create("a", 20_000_000)
        with store.create("b", 8_000_000) as writer, pytest.raises(NoSpace, match="2000000 bytes are free"):
            store.create("c", 8_000_000)
            del writer
        write_object(store, "d", random_bytes(4 << 20))
        assert store.info().used_bytes == 4 << 20
    finally:
        node.close()


def test_a_node_takes_no_more_bytes_than_its_capacity(tmp_path: Path) -> None:
    """A writer over the wire need not say in advance how much it writes."""
    node = LocalNode(tmp_path, NodeOptions(pass_descriptors=False), capacity=10_000_000)
    try:
        store = NodeStore(node.address)
        part = memoryview(random_bytes(4 << 20))
        with store.create("a") as first, store.create("b") as second:
            assert (first.append(part), second.append(part)) == (0, 0)
            for writer in (first, second):
                with pytest.raises(NoSpace, match="are free on this node; free space on its device, or add a node"):
                    writer.append(part)
            for put in (store.put, store.put_new):
                with pytest.raises(NoSpace, match="does not fit"):
                    put("c", bytes(part))
            store.put("small", b"1")
            assert (first.commit(), second.commit()) == (len(part), len(part))
        assert store.info().used_bytes == 2 * len(part) + 1
        assert store.get("a") == part
    finally:
        node.close()


def test_an_upload_that_is_being_committed_takes_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow disk that takes long, and other clients write meanwhile."""
    node = LocalNode(tmp_path, NodeOptions(pass_descriptors=False), capacity=10_000_000)
    free: list[int] = []
    publish = node.device.store._publish_temporary

    def publish_after_a_look(temporary: str, path: str) -> None:
        free.append(node.server.uploads.free_bytes())
        publish(temporary, path)

    monkeypatch.setattr(node.device.store, "_publish_temporary", publish_after_a_look)
    try:
        write_object(NodeStore(node.address), "a", bytes(4_000_000))
        assert free == [6_000_000]
        assert node.server.uploads.free_bytes() == 6_000_000
    finally:
        node.close()


def test_a_put_leaves_the_space_of_uploads(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, capacity=10_000_000)
    try:
        store = NodeStore(node.address)
        with store.create("upload", 9_000_000) as writer:
            store.put("a", bytes(600_000))
            with pytest.raises(NoSpace, match="b of 600000 bytes does not fit: 400000 bytes are free"):
                store.put("b", bytes(600_000))
            writer.append(memoryview(bytes(9_000_000)))
            writer.commit()
        assert store.info().used_bytes == 9_600_000
    finally:
        node.close()


@pytest.mark.parametrize("new", [False, True])
def test_puts_at_once_share_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    """The second object arrives while the first one is written."""
    node = LocalNode(tmp_path, capacity=10_000_000)
    store, refused = NodeStore(node.address), list[NoSpace]()
    method = "put_new" if new else "put"
    write = getattr(node.device.store, method)

    def put_another_first(name: str, data: bytes) -> None:
        if name == "a":
            with pytest.raises(NoSpace, match="b of 6000000 bytes does not fit: 4000000 bytes are free") as raised:
                store.call("put", "b", bytes(6_000_000), new)
            refused.append(raised.value)
        write(name, data)

    monkeypatch.setattr(node.device.store, method, put_another_first)
    try:
        store.call("put", "a", bytes(6_000_000), new)
        assert len(refused) == 1
        assert node.server.uploads.free_bytes() == 4_000_000
        store.call("put", "c", bytes(4_000_000), new)
    finally:
        node.close()


def test_calls_are_counted_by_verb(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, NodeOptions(pass_descriptors=False))
    try:
        store = NodeStore(node.address)
        store.put("a", b"hello")
        for _ in range(3):
            assert store.get("a") == b"hello"
        with suppress(NotFound):
            store.get("b")
        assert node.server.counters["calls", "put"] == 1
        assert node.server.counters["calls", "get"] == node.server.counters["calls", "get.read"] == 3
        assert node.server.counters["errors", "get"] == 1
    finally:
        node.close()


def test_calls_of_unknown_verbs_are_counted_together(local_node: LocalNode, store: NodeStore) -> None:
    store.call("list", "")
    before = len(local_node.server.counters)
    for number in range(20):
        with pytest.raises(InvalidArgument, match=f"has no call 'no {number}'"):
            store.call(f"no {number}")
    assert local_node.server.counters["errors", "unknown"] == 20
    assert len(local_node.server.counters) <= before + 3


def test_used_bytes_are_those_of_the_objects(tmp_path: Path) -> None:
    """This holds at every moment. Other files on the disk do not count."""
    node = LocalNode(tmp_path)
    try:
        store = NodeStore(node.address)
        assert store.info().used_bytes == 0
        store.put("a", bytes(1000))
        store.put("a", bytes(500))
        store.put_new("b/c", bytes(20))
        with pytest.raises(AlreadyExists):
            store.put_new("b/c", bytes(3000))
        write_object(store, "b/d", random_bytes(100_000))
        write_object(store, "b/d", random_bytes(90_000))
        with store.create("torn", 5000) as writer:
            writer.append(memoryview(random_bytes(5000)))
        assert store.info().used_bytes == 500 + 20 + 90_000
        store.delete(["a", "never"])
        assert store.info().used_bytes == 20 + 90_000
        store.quarantine("b/d")
        store.quarantine("b/d")
        assert store.info().used_bytes == 20
        with pytest.raises(NotFound):
            store.get("b/d")
        write_object(store, "e", random_bytes(7000))
    finally:
        node.close()
    again = LocalNode(tmp_path)
    try:
        assert again.server.usage()[0] == 20 + 7000, "counted at the start of the node"
    finally:
        again.close()


def test_used_bytes_include_objects_of_other_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is a member without a node has many writers."""
    first, second = Device(tmp_path), Device(tmp_path)
    assert first.usage()[0] == 0
    first.store.put("a", bytes(100))
    assert first.usage()[0] == 100
    monkeypatch.setattr(device, "_RECOUNT_SECONDS", 0.0)
    second.store.put("b", bytes(10))
    assert first.usage()[0] == second.usage()[0] == 110


def test_a_read_only_node_refuses_writes(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, NodeOptions(read_only=True))
    try:
        store = NodeStore(node.address)
        for call in (
            lambda: store.put("a", b""), lambda: store.create("a"), lambda: store.delete(["a"]),
            lambda: store.registers.learn("a", RegisterValue(b"")),
        ):  # fmt: skip
            with pytest.raises(Refused, match="read-only"):
                call()
        assert store.info().state == "read-only"
    finally:
        node.close()


def test_an_upload_of_a_vanished_client_expires(tmp_path: Path) -> None:
    node = LocalNode(tmp_path, NodeOptions(lease_seconds=0.2))
    try:
        store = NodeStore(node.address)
        key = store.call("create", "a", 0)  # without a writer, nothing renews the lease
        store.append(key, memoryview(random_bytes(5000)))
        deadline = time.monotonic() + 600
        while len(node.server.uploads) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not len(node.server.uploads)
        with pytest.raises(NotFound, match="write the object again"):
            store.append(key, memoryview(b"more"))
        store.call("abort", key)
        assert list(store.list()) == []
        while any(p.is_file() for p in (tmp_path / "objects").rglob("*")):  # deleted right after the upload has expired
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        node.close()


CLOSER = """
import os, sys, threading
from ckpt.storage.node.client import NodeStore
store, errors = NodeStore(sys.argv[1]), []
def work(number):
    try:
        for _ in range(40):
            store.put(f"x{number}", b"1" * 100_000)
            assert b"".join(store.read(f"x{number}", 0, 100_000)) == b"1" * 100_000
            with store.create(f"y{number}") as writer:
                writer.append(memoryview(b"2" * 5000))
                writer.commit()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    store.close()
assert not errors, errors
"""


@pytest.mark.slow
def test_a_client_is_closed_safely_during_calls_of_other_threads(local_node: LocalNode) -> None:
    """This happens when an answer times out. The `close` of Flight frees memory that such a call is using."""
    done = subprocess.run([sys.executable, "-c", CLOSER, local_node.address], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unreachable_node_raises_unavailable() -> None:
    store = NodeStore("127.0.0.1:1", NodeCredentials(deadline_seconds=1))
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), store.info, lambda: store.registers.read(["a"])):
        with pytest.raises(Unavailable, match=r"node://127\.0\.0\.1:1"):
            call()


@pytest.mark.slow
def test_an_answer_that_is_never_sent_leaves_no_open_file(local_node: LocalNode, store: NodeStore) -> None:
    """A client may be gone before its answer begins."""
    store.put("a", DATA)
    gc.collect()
    before = open_objects_now()
    answer = local_node.server._stream_object(flight.Ticket(wire.pack(["a", 0, 100])))
    assert open_objects_now() != before
    del answer
    gc.collect()
    assert open_objects_now() == before
