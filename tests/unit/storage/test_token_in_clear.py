"""A token is sent to other hosts only over TLS."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ckpt.aggregator.cluster import config
from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.storage.base.errors import InvalidArgument, Unavailable
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials, is_loopback, require_encryption

TOKEN = "a token that is long enough"


def test_a_token_is_not_sent_in_clear_beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TOKEN", TOKEN)
    monkeypatch.delenv("CKPT_CA_FILE", raising=False)
    monkeypatch.delenv("CKPT_INSECURE", raising=False)
    with pytest.raises(InvalidArgument, match=r"192\.0\.2\.1:7070.*CKPT_CA_FILE.*CKPT_INSECURE"):
        open_namespace("ckpt://192.0.2.1:7070/run")
    for host in ("127.example.org", "0.0.0.0", "[2001:db8::1]", "localhost.example.org"):
        with pytest.raises(InvalidArgument, match="without encryption"):
            NodeStore(f"{host}:7070", NodeCredentials(TOKEN))


def test_a_token_is_sent_to_loopback_over_tls_or_if_insecure_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "[::1]"):
        require_encryption(NodeCredentials(TOKEN), f"{host}:7070")
    require_encryption(NodeCredentials(TOKEN, ca=b"pem"), "192.0.2.1:7070")
    require_encryption(NodeCredentials(None), "192.0.2.1:7070")
    monkeypatch.setenv("CKPT_TOKEN", TOKEN)
    monkeypatch.setenv("CKPT_INSECURE", "1")
    assert config.find_config("192.0.2.1:7070").credentials.insecure
    monkeypatch.delenv("CKPT_INSECURE")
    assert config.config_from_table("n", {"members": ["192.0.2.1:7070"], "insecure": True}, "the test").credentials.insecure
    with pytest.raises(InvalidArgument, match="write true or false"):
        config.config_from_table("n", {"members": ["192.0.2.1:7070"], "insecure": "no"}, "the test")


def test_a_host_name_that_begins_like_loopback_is_not_loopback() -> None:
    assert is_loopback("127.0.0.2")
    assert not is_loopback("127.attacker.example")


def test_a_proxy_of_the_environment_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(Unavailable):
            NodeStore("127.0.0.1:1", NodeCredentials(TOKEN, deadline_seconds=1)).get("a")
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
