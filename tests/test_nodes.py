"""A node: the contract of a store behind a wire, and everything that it must refuse."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from cluster import Here, Process

from ckpt.storage.base.errors import (
    AlreadyExists,
    IntegrityError,
    InvalidArgument,
    InvalidName,
    NoSpace,
    NotFound,
    Refused,
    StoreError,
    Unavailable,
)
from ckpt.storage.member import device as devices
from ckpt.storage.member.device import Device
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.credentials import NodeCredentials, TokenFile
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import StoreContract, random_bytes, read_range, write_object


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Here]:
    made = Here(tmp_path / "node")
    yield made
    made.close()


@pytest.fixture
def store(node: Here) -> Iterator[NodeStore]:
    made = NodeStore(node.address, NodeCredentials(deadline_seconds=10))
    yield made
    made.close()


class TestNodeStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[NodeStore]:
        made = Here(tmp_path / "node")
        store = NodeStore(made.address, NodeCredentials(deadline_seconds=20))
        yield store
        store.close()
        made.close()


# --- what is refused -------------------------------------------------------------------------------------------


def test_a_wrong_token(tmp_path: Path) -> None:
    node = Here(tmp_path, NodeOptions(tokens=lambda: ("the right one, long enough",)))
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


@pytest.mark.parametrize("near", [True, False])
def test_a_token_that_is_replaced(tmp_path: Path, near: bool) -> None:
    """At first both are right, then the old one is not any more: not for who was let in before, either."""
    file = tmp_path / "token"
    tokens = {which: f"the {which} one, long enough" for which in ("old", "new")}
    file.write_text(tokens["old"] + "\n")
    node = Here(tmp_path / "node", NodeOptions(tokens=TokenFile(file), pass_descriptors=near))
    try:
        old, new = (NodeStore(node.address, NodeCredentials(token=tokens[which], deadline_seconds=20)) for which in tokens)
        old.put("a", b"1")
        assert old.get("a") == b"1"
        upload = old.create("b")
        with pytest.raises(Refused):
            new.get("a")
        file.write_text("\n".join(tokens.values()))
        assert old.get("a") == new.get("a") == b"1"
        file.write_text(tokens["new"])
        assert new.get("a") == b"1"
        for call in (lambda: old.get("a"), lambda: old.put("c", b""), upload.commit):
            with pytest.raises(Refused, match="wrong or missing token"):
                call()
        for useless in ("short", ""):
            file.write_text(useless)
            assert new.get("a") == b"1", "nobody is let in, and nobody locked out, by a mistake"
            with pytest.raises(Refused):
                old.get("a")
        file.unlink()
        assert new.get("a") == b"1"
    finally:
        node.close()


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "a//b", ".hidden", "x" * 300, "a\x00b"])
def test_names_that_leave_the_root(node: Here, store: NodeStore, name: str) -> None:
    for verb, arguments in (("put", [name, b"1", False]), ("create", [name, 0]), ("delete", [[name]]), ("exists", [name])):
        with pytest.raises(InvalidName, match="not a valid object name"):
            store.call(verb, *arguments)
    with pytest.raises(InvalidName):
        list(store.read(name, 0, 10))
    assert sorted(p.name for p in node.folder.iterdir()) == ["device.json", "lock"]


def test_a_symbolic_link_out_of_the_root(node: Here, store: NodeStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    store.put("a", b"1")
    (node.folder / "objects" / "out").symlink_to(secret)
    (node.folder / "objects" / "key").symlink_to(secret / "key")
    for name in ("out/key", "key"):
        with pytest.raises(InvalidName, match="symbolic link"):
            store.get(name)
        with pytest.raises(InvalidName, match="symbolic link"):
            store.put(name, b"overwritten")
        with pytest.raises(InvalidName, match="symbolic link"):
            store.delete([name])
    assert (secret / "key").read_bytes() == b"secret"


def test_oversized_messages(store: NodeStore) -> None:
    key = store.call("create", "a", 0)
    descriptor = flight.FlightDescriptor.for_command(wire.pack([key, wire.MESSAGE_BYTES + 1, b""]))
    with pytest.raises(InvalidArgument, match="is refused"), store.convert_flight_errors("test"):
        writer, reader = store.next_connection().do_put(descriptor, wire.SCHEMA, store.call_options())
        writer.done_writing()
        reader.read()
        writer.close()


def test_garbage(node: Here, store: NodeStore) -> None:
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
            with suppress(pa.ArrowException):  # it may be refused before
                writer.write_batch(batch)
                writer.done_writing()
                reader.read()
            writer.close()
    with pytest.raises(InvalidArgument):
        store.call("create", "c", -(1 << 60))
    assert store.info().state == "serving"


def test_bytes_that_changed_on_the_way(store: NodeStore) -> None:
    key = store.call("create", "a", 0)
    descriptor = flight.FlightDescriptor.for_command(wire.pack([key, 5, b"0" * 16]))
    with pytest.raises(IntegrityError, match="send the append again"), store.convert_flight_errors("test"):
        writer, reader = store.next_connection().do_put(descriptor, wire.SCHEMA, store.call_options())
        writer.write_batch(wire.to_record_batch(memoryview(b"hello")))
        writer.done_writing()
        reader.read()
        writer.close()
    assert store.append(key, memoryview(b"hello")) == 0, "and the upload goes on"
    assert store.call("commit", key) == 5


def test_a_full_node(tmp_path: Path) -> None:
    node = Here(tmp_path, capacity=10_000_000)
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


def test_used(tmp_path: Path) -> None:
    """The bytes of the objects, at every moment: nothing else that the disk holds."""
    node = Here(tmp_path)
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
    again = Here(tmp_path)
    try:
        assert again.server.usage()[0] == 20 + 7000, "counted at the start"
    finally:
        again.close()


def test_used_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is a member by itself has many writers."""
    first, second = Device(tmp_path), Device(tmp_path)
    assert first.usage()[0] == 0
    first.store.put("a", bytes(100))
    assert first.usage()[0] == 100
    monkeypatch.setattr(devices, "_RECOUNT_SECONDS", 0.0)
    second.store.put("b", bytes(10))
    assert first.usage()[0] == second.usage()[0] == 110


def test_a_read_only_node(tmp_path: Path) -> None:
    node = Here(tmp_path, NodeOptions(read_only=True))
    try:
        store = NodeStore(node.address)
        for call in (lambda: store.put("a", b""), lambda: store.create("a"), lambda: store.delete(["a"])):
            with pytest.raises(Unavailable, match="read-only"):
                call()
        assert store.info().state == "read-only"
    finally:
        node.close()


def test_a_client_that_vanished(tmp_path: Path) -> None:
    node = Here(tmp_path, NodeOptions(lease_seconds=0.2))
    try:
        store = NodeStore(node.address)
        writer = store.create("a")
        writer.append(memoryview(random_bytes(5000)))
        until = time.monotonic() + 20
        while len(node.server.uploads) and time.monotonic() < until:
            time.sleep(0.05)
        assert not len(node.server.uploads)
        with pytest.raises(NotFound, match="write the object again"):
            writer.append(memoryview(b"more"))
        writer.abort()
        assert list(store.list()) == []
        assert not [p for p in (tmp_path / "objects").rglob("*") if p.is_file()]
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


def test_closed_beneath_the_calls_of_other_threads(node: Here) -> None:
    """As where an answer is not waited for. Flight's own `close` frees what such a call is using."""
    said = subprocess.run([sys.executable, "-c", CLOSER, node.address], capture_output=True, text=True, timeout=300)
    assert (said.returncode, said.stderr) == (0, "")


def test_nobody_there() -> None:
    store = NodeStore("127.0.0.1:1", NodeCredentials(deadline_seconds=1))
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), store.info, lambda: store.registers.read(["a"])):
        with pytest.raises(Unavailable, match=r"node://127\.0\.0\.1:1"):
            call()


# --- as a process ----------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    node = Process(tmp_path / "data", "--domain", "rack=r1,host=h3", "--capacity", "1GB", "--no-near")
    try:
        store = NodeStore(node.address)
        data = random_bytes(3 << 20)
        write_object(store, "a/b", data)
        assert read_range(store, "a/b", 1 << 20, 100) == data[1 << 20 : (1 << 20) + 100]
        info = store.info()
        assert info.labels == (("rack", "r1"), ("host", "h3"))
        assert info.free_bytes <= 10**9
        with urllib.request.urlopen(f"http://127.0.0.1:{node.monitor}/metrics") as answer:
            text = answer.read().decode()
        assert f'ckpt_node_bytes_received_total{{verb="put"}} {float(len(data))}' in text or "3.145728e+06" in text
        assert f"ckpt_node_used_bytes {float(len(data))}" in text or "used_bytes 3.145728e+06" in text
        with urllib.request.urlopen(f"http://127.0.0.1:{node.monitor}/healthz") as answer:
            assert answer.read() == b"serving\n"
        node.signal(signal.SIGTERM)
        assert node.process.wait(30) == 0
        assert any("draining" in line for line in node.log)
    finally:
        node.close()


def test_a_killed_node_comes_back_clean(tmp_path: Path) -> None:
    node = Process(tmp_path / "data", "--no-near")
    try:
        store = NodeStore(node.address, NodeCredentials(deadline_seconds=5))
        store.put("kept", b"1")
        writer = store.create("torn")
        writer.append(memoryview(random_bytes(1 << 20)))
        node.kill()
        with pytest.raises(Unavailable):
            writer.append(memoryview(b"more"))
        identity = (tmp_path / "data" / "device.json").read_bytes()
        node.start()
        assert {e.name for e in store.list()} == {"kept"}
        assert store.get("kept") == b"1"
        assert len([p for p in (tmp_path / "data" / "objects").rglob("*") if p.is_file()]) == 1, "what was torn is gone"
        assert (tmp_path / "data" / "device.json").read_bytes() == identity
        with pytest.raises(NotFound):
            writer.commit()
    finally:
        node.close()


def test_a_node_that_serves_again_is_reached_at_once(tmp_path: Path) -> None:
    """Who was refused all the while, too: gRPC repeats the refusal of before for up to a second."""
    node = Process(tmp_path / "data", "--no-near")
    store = NodeStore(node.address, NodeCredentials(deadline_seconds=5))
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            with suppress(Unavailable):
                store.exists("a")

    try:
        store.put("a", b"1")
        node.kill()
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            node.start()
        finally:
            ended.set()
            asking.join()
        assert store.get("a") == b"1"
    finally:
        node.close()


def test_over_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    node = Process(tmp_path / "data", "--no-near", host="[::1]")
    try:
        store = NodeStore(node.address)
        store.put("a", b"1")
        assert store.get("a") == b"1"
        with urllib.request.urlopen(f"http://[::1]:{node.monitor}/healthz") as answer:
            assert answer.read() == b"serving\n"
    finally:
        node.close()


def test_a_line_an_event(tmp_path: Path) -> None:
    """What is refused, and what nobody has thought of."""
    node = Process(tmp_path / "data", "--no-near", failpoints="node.get=error")
    try:
        store = NodeStore(node.address, NodeCredentials(deadline_seconds=20))
        with pytest.raises(StoreError, match="see its log"):
            store.get("a")
        for verb in ("list", "put"):
            with pytest.raises(InvalidArgument, match="invalid arguments"):
                store.call(verb, 5)
        node.signal(signal.SIGTERM)
        assert node.process.wait(60) == 0
        node.ended()
        assert [line for line in node.log if not re.match(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING|ERROR) ", line)] == []
        assert len(node.log) == 1 + 3 + 2
        assert [line for line in node.log if "ERROR" in line and "Traceback" in line and "injected" in line]
    finally:
        node.close()


def test_a_stopped_node(tmp_path: Path) -> None:
    node = Process(tmp_path / "data")
    try:
        store = NodeStore(node.address, NodeCredentials(deadline_seconds=1))
        store.put("a", b"1")
        node.signal(signal.SIGSTOP)
        for call in (lambda: store.get("a"), lambda: store.put("b", b""), lambda: store.registers.read(["a"])):
            with pytest.raises(Unavailable):
                call()
        node.signal(signal.SIGCONT)
        assert store.get("a") == b"1"
    finally:
        node.close()


def certificates(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out",
         str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_useless_certificates(tmp_path: Path) -> None:
    cert, key = certificates(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    wrong = certificates(other)[1]
    for options, told in (([cert, wrong], "--tls-cert"), ([cert, key, __file__], "--tls-ca")):
        named = [str(x) for pair in zip(("--tls-cert", "--tls-key", "--tls-ca"), options, strict=False) for x in pair]
        command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *named]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert told in done.stderr


def test_tls(tmp_path: Path) -> None:
    cert, key = certificates(tmp_path)
    token = tmp_path / "token"
    token.write_text("a token that is long enough\n")
    node = Process(tmp_path / "data", "--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token))
    try:
        good = NodeStore(node.address, NodeCredentials("a token that is long enough", cert.read_bytes(), deadline_seconds=10))
        good.put("a", b"1")
        assert good.get("a") == b"1"
        with pytest.raises(Unavailable):
            NodeStore(node.address, NodeCredentials("a token that is long enough", deadline_seconds=2)).get("a")
        with pytest.raises(Refused):
            NodeStore(node.address, NodeCredentials("another", cert.read_bytes(), deadline_seconds=10)).get("a")
    finally:
        node.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--data is missing"),
        (["--data", "d", "--listen", "0.0.0.0:0"], "can be reached from other hosts"),
        (["--data", "d", "--listen", "here"], "write HOST:PORT"),
        (["--data", "d", "--capacity", "much"], "is not a size"),
        (["--data", "d", "--listen", "::1:7070"], "such as 127.0.0.1:7070 or [::1]:7070"),
        (["--data", "d", "--capacity", "-5"], "is not a size"),
        (["--data", "d", "--domain", "rack"], "KEY=VALUE"),
        (["--data", "d", "--tls-cert", __file__], "must be given together"),
        (["--data", "d", "--token-file", "/dev/null"], "use 16 or more"),
    ],
)
def test_wrong_usage(tmp_path: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "ckpt.tools.node", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken(tmp_path: Path, node: Here) -> None:
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "other"), "--listen", node.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "choose another --listen" in done.stderr
