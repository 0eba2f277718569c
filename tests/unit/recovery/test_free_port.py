"""A free port of this host, which each attempt of a run needs for its ranks."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ckpt.recovery.ranks import launch
from ckpt.storage.base.errors import CkptError


@pytest.fixture(autouse=True)
def fixture_unknown_address() -> Iterator[None]:
    """Let each test begin and end without an address that another one has found."""
    launch._own_address.cache_clear()
    yield
    launch._own_address.cache_clear()


def test_ranks_start_again_although_the_name_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has looked the name of its host up when it started."""
    launch.free_port("localhost")

    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(launch.socket, "getaddrinfo", fail)
    port = launch.free_port("localhost")
    with socket.create_server(("127.0.0.1", port)):
        assert launch.free_port("localhost") != port


def test_an_address_that_another_host_has_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [("192.0.2.1", 0), ("127.0.0.1", 0)]

    def look_up(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", addresses.pop(0))]

    monkeypatch.setattr(launch.socket, "getaddrinfo", look_up)
    with pytest.raises(CkptError, match=r"host.example can't be listened on: .*; give one of this host as --address") as raised:
        launch.free_port("host.example")
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.EADDRNOTAVAIL
    assert launch.free_port("host.example") > 0
