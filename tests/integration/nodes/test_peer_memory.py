"""A process reads the memory of a peer on another host: over TLS with a token, or not at all."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.network_namespaces import Hosts, hosts_on_a_wire
from helpers.peers import MARK, NAMES, TOKEN, Relay, first_line, server_command, tls_variables, unprotected_environment

from ckpt.adapters.peer_address import load_from_peer, open_peer, parse_peer_address
from ckpt.adapters.peer_memory import PeerMemory
from ckpt.errors import InvalidArgument, Refused, Untrusted
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials

ServerOn = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_on_a_wire(1) as found:
        yield found


@pytest.fixture
def serve(hosts: Hosts) -> Iterator[ServerOn]:
    """Return a function that starts a server on the other host, and returns it with its address."""
    made: list[subprocess.Popen[str]] = []

    def start(variables: dict[str, str], host: str | None = None) -> tuple[subprocess.Popen[str], str]:
        process = hosts.run(
            0, *server_command(hosts.address(0) if host is None else host), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=unprotected_environment() | variables,
        )  # fmt: skip
        made.append(process)
        return process, first_line(process)

    yield start
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def variables(hosts: Hosts, tmp_path: Path) -> dict[str, str]:
    return tls_variables(tmp_path / "job", f"IP:{hosts.address(0)},IP:127.0.0.1")


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def received(address: str, seconds: float = 30.0) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = load_from_peer(open_peer(address, seconds), 3, seconds, "step 3")
    return found


def through(relay: Relay, address: str) -> str:
    return address.replace(parse_peer_address(address).host_port, relay.address)


# --- who may serve whom ------------------------------------------------------------------------------------------


def test_without_options_only_this_host_is_served() -> None:
    with PeerMemory() as memory:
        assert parse_peer_address(memory.address).host_port.startswith("127.0.0.1:")
        port = memory.address.split(":")[-1].split("/")[0]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", int(port)), 5)


def test_the_error_on_another_host_names_the_variable_to_set(serve: ServerOn) -> None:
    _, address = serve({}, "")
    with pytest.raises(Refused, match=r"serves its memory only on its own host: set CKPT_TOKEN_FILE, CKPT_TLS_CERT_FILE"):
        received(address)


def test_beyond_loopback_everything_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"reach the memory .* at 192\.0\.2\.1: set CKPT_TOKEN_FILE, CKPT_TLS_CERT_FILE, CKPT_TLS_KEY_FILE, CKPT_CA_FILE",
    ):
        PeerMemory("192.0.2.1")
    variables = tls_variables(tmp_path / "job")
    for missing in variables:
        set_all(monkeypatch, variables)
        monkeypatch.delenv(missing)
        with pytest.raises(InvalidArgument, match=rf"set {missing} in the environment, or CKPT_INSECURE=1"):
            PeerMemory("192.0.2.1")
    set_all(monkeypatch, variables)
    monkeypatch.delenv("CKPT_CA_FILE")
    monkeypatch.setenv("CKPT_INSECURE", "1")
    with pytest.raises(InvalidArgument, match="set CKPT_CA_FILE in the environment"):
        PeerMemory("192.0.2.1")  # a certificate that no client could check is a mistake


def test_a_key_of_another_certificate_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_all(monkeypatch, tls_variables(tmp_path / "job"))
    monkeypatch.setenv("CKPT_TLS_KEY_FILE", tls_variables(tmp_path / "other")["CKPT_TLS_KEY_FILE"])
    with pytest.raises(InvalidArgument, match=r"CKPT_TLS_CERT_FILE .* with CKPT_TLS_KEY_FILE .*give a chain and its key"):
        PeerMemory("192.0.2.1")


# --- over the network --------------------------------------------------------------------------------------------


def test_a_peer_reads_over_tls(serve: ServerOn, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = serve(variables)
    assert TOKEN not in address  # the frameworks send the address without encryption
    set_all(monkeypatch, variables)
    with Relay(parse_peer_address(address).host_port) as relay:
        assert np.array_equal(received(through(relay, address))["w"], np.arange(8 << 20, dtype=np.uint32))
        assert len(relay.passed) > 32 << 20
        assert MARK not in relay.passed


def test_without_tls_both_sides_must_allow_it(serve: ServerOn, monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = serve({"CKPT_INSECURE": "1"})
    with pytest.raises(Refused, match=r"without TLS: set .* there, or CKPT_INSECURE=1 on all hosts"):
        received(address)
    monkeypatch.setenv("CKPT_INSECURE", "1")
    with Relay(parse_peer_address(address).host_port) as relay:
        assert np.array_equal(received(through(relay, address))["w"], np.arange(8 << 20, dtype=np.uint32))
        assert MARK in relay.passed  # so that the test above would find it


def test_another_authority_ends_the_wait_at_once(
    serve: ServerOn, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, address = serve(variables)
    set_all(monkeypatch, variables | {"CKPT_CA_FILE": tls_variables(tmp_path / "other")["CKPT_CA_FILE"]})
    with pytest.raises(Untrusted, match=r"certificate verify failed.*CKPT_CA_FILE"):
        received(address, 600.0)
    monkeypatch.setenv("CKPT_CA_FILE", variables["CKPT_TOKEN_FILE"])
    with pytest.raises(InvalidArgument, match=r"CKPT_CA_FILE .*give the certificates of an authority"):
        received(address, 600.0)


def test_an_expired_certificate_ends_the_wait_at_once(
    serve: ServerOn, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = tls_variables(tmp_path / "job", f"IP:{hosts.address(0)}", days=-1)
    _, address = serve(variables)
    set_all(monkeypatch, variables)
    with pytest.raises(Untrusted, match="certificate has expired"):
        received(address, 600.0)


def test_a_certificate_of_another_name_ends_the_wait_at_once(
    serve: ServerOn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = tls_variables(tmp_path / "job")
    _, address = serve(variables)
    set_all(monkeypatch, variables)
    with pytest.raises(Untrusted, match="is not in peer certificate"):
        received(address, 600.0)


def test_without_a_token_or_with_a_wrong_one_nothing_is_read(
    serve: ServerOn, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = serve(variables)
    set_all(monkeypatch, variables)
    monkeypatch.delenv("CKPT_TOKEN_FILE")
    with pytest.raises(InvalidArgument, match="set CKPT_TOKEN_FILE in this process"):
        received(address)
    monkeypatch.setenv("CKPT_TOKEN", "another token that is long enough")
    with pytest.raises(Refused, match="a wrong or missing token"):
        received(address)
    monkeypatch.delenv("CKPT_CA_FILE")
    with pytest.raises(InvalidArgument, match="serves its memory with TLS: set CKPT_CA_FILE"):
        received(address)


def test_a_client_without_tls_gets_nothing(serve: ServerOn, variables: dict[str, str]) -> None:
    _, address = serve(variables)
    where = parse_peer_address(address).host_port
    with pytest.raises(Unavailable):
        NodeStore(where, NodeCredentials(TOKEN, deadline_seconds=5, insecure=True)).info()
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)


def test_silent_clients_do_not_keep_others_from_reading(
    serve: ServerOn, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = serve(variables)
    set_all(monkeypatch, variables)
    host, _, port = parse_peer_address(address).host_port.rpartition(":")
    silent = [socket.create_connection((host, int(port)), 5) for _ in range(50)]
    try:
        assert len(received(address)["w"]) == 8 << 20
    finally:
        for each in silent:
            each.close()


def test_a_silent_server_times_out(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, variables)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"timed out: step 3 did not arrive within 1 s: .*did not answer"):
            received(f"peer+tls://127.0.0.1:{silent.getsockname()[1]}/", 1.0)
        assert time.monotonic() - started < 15


@pytest.mark.parametrize("fault", ["cut_after", "silent_after"])
def test_a_connection_that_fails_in_the_middle_times_out(
    serve: ServerOn, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    _, address = serve(variables)
    set_all(monkeypatch, variables)
    with Relay(parse_peer_address(address).host_port, **{fault: 8 << 20}) as relay:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"timed out: step 3 did not arrive within 3 s: .*"):
            received(through(relay, address), 3.0)
        assert len(relay.passed) > 8 << 20
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_ends_or_stops_in_the_middle_times_out(
    serve: ServerOn, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    process, address = serve(variables)
    set_all(monkeypatch, variables)
    store = open_peer(address, 3.0)
    assert store.get_up_to(next(iter(store.list())).name, 1 << 30)
    process.send_signal(fault)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"timed out: step 3 did not arrive within 3 s: .*"):
        load_from_peer(store, 3, 3.0, "step 3")
    assert time.monotonic() - started < 30
