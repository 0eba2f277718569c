"""ckpt-node as a process: killed, stopped, with TLS, on IPv6."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.certificates import certificates
from helpers.node_fixtures import local_node as local_node
from helpers.nodes import LocalNode, NodeProcess
from helpers.processes import free_port, until
from helpers.unread_pipe import full_pipe

from ckpt.storage.base.errors import (
    InvalidArgument,
    NotFound,
    Refused,
    StoreError,
    Unavailable,
)
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.node.token_check import TokenFile
from ckpt.storage.testing import random_bytes, read_range, write_object


@pytest.mark.parametrize("near", [True, False])
def test_an_old_token_is_refused_after_its_replacement(tmp_path: Path, near: bool) -> None:
    """At first both tokens are accepted, then the old one is not any more, also for clients that are already connected."""
    file = tmp_path / "token"
    tokens = {which: f"the {which} one, long enough" for which in ("old", "new")}
    file.write_text(tokens["old"] + "\n")
    node = LocalNode(tmp_path / "node", NodeOptions(tokens=TokenFile(file), pass_descriptors=near))
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
            assert new.get("a") == b"1", "an invalid token file changes who is accepted"
            with pytest.raises(Refused):
                old.get("a")
        file.unlink()
        assert new.get("a") == b"1"
    finally:
        node.close()


def test_the_node_command_serves_and_reports_metrics(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data", "--domain", "rack=r1,host=h3", "--capacity", "1GB", "--no-fd-passing")
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
        assert node.process.wait(600) == 0
        assert any("draining" in line for line in node.log)
    finally:
        node.close()


def test_a_killed_node_restarts_without_partial_objects(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data", "--no-fd-passing")
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
        assert len([p for p in (tmp_path / "data" / "objects").rglob("*") if p.is_file()]) == 1, "a partial object is left"
        assert (tmp_path / "data" / "device.json").read_bytes() == identity
        with pytest.raises(NotFound):
            writer.commit()
    finally:
        node.close()


def test_a_restarted_node_is_reached_at_once(tmp_path: Path) -> None:
    """This also holds for a client that was refused all the time: gRPC repeats the earlier refusal for up to a second."""
    node = NodeProcess(tmp_path / "data", "--no-fd-passing")
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


def test_a_node_serves_on_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    node = NodeProcess(tmp_path / "data", "--no-fd-passing", host="[::1]")
    try:
        store = NodeStore(node.address)
        store.put("a", b"1")
        assert store.get("a") == b"1"
        with urllib.request.urlopen(f"http://[::1]:{node.monitor}/healthz") as answer:
            assert answer.read() == b"serving\n"
    finally:
        node.close()


def test_a_node_logs_one_line_for_each_event(tmp_path: Path) -> None:
    """The events are refused calls, and an unexpected error with its traceback."""
    node = NodeProcess(tmp_path / "data", "--no-fd-passing", failpoints="node.get=error")
    try:
        store = NodeStore(node.address, NodeCredentials(deadline_seconds=20))
        with pytest.raises(StoreError, match="see its log"):
            store.get("a")
        for verb in ("list", "put"):
            with pytest.raises(InvalidArgument, match="invalid arguments"):
                store.call(verb, 5)
        node.signal(signal.SIGTERM)
        assert node.process.wait(600) == 0
        node.ended()
        assert [line for line in node.log if not re.match(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING|ERROR) ", line)] == []
        assert len(node.log) == 1 + 3 + 2
        assert [line for line in node.log if "ERROR" in line and "Traceback" in line and "injected" in line]
    finally:
        node.close()


def test_a_call_to_a_stopped_node_ends_at_its_deadline(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data")
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


def test_unusable_certificates_are_refused_in_one_line(tmp_path: Path) -> None:
    cert, key = certificates(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    wrong = certificates(other)[1]
    for options, message in (([cert, wrong], "--tls-cert"), ([cert, key, __file__], "--tls-ca")):
        named = [str(x) for pair in zip(("--tls-cert", "--tls-key", "--tls-ca"), options, strict=False) for x in pair]
        command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *named]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert message in done.stderr


def test_a_node_serves_by_tls_with_a_token(tmp_path: Path) -> None:
    cert, key = certificates(tmp_path)
    token = tmp_path / "token"
    token.write_text("a token that is long enough\n")
    node = NodeProcess(tmp_path / "data", "--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token))
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
        (["--data", "d", "--listen", "127.0.0.1:99999"], "127.0.0.1:99999: the port must be 0 to 65535"),
        (["--data", "d", "--listen", "::1:7070"], "such as 127.0.0.1:7070 or [::1]:7070"),
        (["--data", "d", "--capacity", "-5"], "is not a size"),
        (["--data", "d", "--domain", "rack"], "KEY=VALUE"),
        (["--data", "d", "--repair", "http://x"], "--repair http://x: http://x is not a URL of a namespace; write ckpt://"),
        (["--data", "d", "--tls-cert", __file__], "must be given together"),
        (["--data", "d", "--token-file", "/dev/null"], "use 16 or more"),
        (["--drain-seconds", "inf"], "inf is not in the range 0<=x<=1000000000.0"),
        (["--drain-seconds", "nan"], "nan can't be used here"),
        (["--repair-every", "1e300"], "1e+300 is not in the range 0<x<=1000000000.0"),
        (["--repair-every", "nan"], "nan can't be used here"),
    ],
)
def test_wrong_options_of_a_node_are_refused_with_advice(tmp_path: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "ckpt.tools.node", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_node_on_a_port_in_use_is_refused_in_one_line(tmp_path: Path, local_node: LocalNode) -> None:
    command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / "other"), "--listen", local_node.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "choose another --listen" in done.stderr


def test_the_status_of_a_node_that_refuses_the_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token that is long enough\n")
    node = LocalNode(tmp_path / "node", NodeOptions(tokens=TokenFile(tmp_path / "token")))
    try:
        command = [sys.executable, "-m", "ckpt.tools.node", "admin", "status", f"ckpt://{node.address}"]
        environ = os.environ | {"CKPT_TOKEN": "another token"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environ)
        answer = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=False, env=environ).stdout)
    finally:
        node.close()
    assert done.returncode == 1
    assert re.search(rf"^{node.address} +refused", done.stdout, re.MULTILINE), done.stdout
    assert "(CKPT_TOKEN_FILE, or token_file in the TOML file)" in done.stdout
    assert done.stdout.endswith("\n0 of 1 members answer\n")
    assert [member["state"] for member in answer["members"]] == ["refused"]


def test_a_node_answers_although_nobody_reads_its_log(tmp_path: Path) -> None:
    port = free_port()
    options = ["--data", str(tmp_path), "--listen", f"127.0.0.1:{port}", "--no-fd-passing"]
    command = [sys.executable, "-m", "ckpt.tools.node", *options]
    env = os.environ | {"CKPT_FAILPOINTS": "node.get=error"}
    store = NodeStore(f"127.0.0.1:{port}", NodeCredentials(deadline_seconds=300))

    def serves() -> bool:
        with suppress(Unavailable):
            store.put("a", b"1")
            return True
        return False

    with full_pipe() as (_, unread), subprocess.Popen([*command, "--monitor", "127.0.0.1:0"], stderr=unread, env=env) as node:
        try:
            until(serves, "the node serves")
            with pytest.raises(StoreError, match="see its log"):
                list(store.read("a", 0, 1))
        finally:
            node.kill()
