"""Host names are looked up once, and nobody waits for a later look-up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.processes import until

from ckpt.storage.base import name_lookup
from ckpt.storage.base.name_lookup import NameLookup

KNOWN = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 7))]


@pytest.fixture(name="name_server")
def fixture_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Yield a function that starts or stops a name server, which knows every name. Stopped, it does not answer."""
    answers = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        answers.wait()
        return KNOWN

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(name_lookup, "_KEEP_SECONDS", 0.0)
    try:
        yield lambda runs: answers.set() if runs else answers.clear()
    finally:
        answers.set()


def test_kept_addresses_are_returned_while_no_name_server_answers(name_server: Callable[[bool], None]) -> None:
    names = NameLookup()
    with pytest.raises(OSError, match="the name server does not answer about host.example"):
        names.addresses("host.example", 7)
    name_server(True)
    assert names.addresses("host.example", 7, 300) == ((socket.AF_INET, ("127.0.0.1", 7)),)
    name_server(False)
    for _ in range(3):
        assert names.addresses("host.example", 7, 300) == ((socket.AF_INET, ("127.0.0.1", 7)),)


def test_a_name_that_is_unknown_at_first_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "_NAME_RETRY_SECONDS", 0.0)
    is_known = False

    def look_up(*_: Any, **__: Any) -> Any:
        if not is_known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return KNOWN

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", look_up)
    names = NameLookup()
    with pytest.raises(OSError, match="Name or service not known"):
        names.addresses("host.example", 7, 300)
    is_known = True

    def is_found() -> bool:
        try:
            return bool(names.addresses("host.example", 7))
        except OSError:
            return False

    until(is_found, "the name is found")


def test_a_look_up_that_runs_out_of_memory_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "_NAME_RETRY_SECONDS", 0.0)
    outcomes: list[Any] = [MemoryError(), KNOWN]

    def look_up(*_: Any, **__: Any) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", look_up)
    names = NameLookup()
    with pytest.raises(OSError, match="there is no memory to look it up"):
        names.addresses("host.example", 7, 300)

    def is_found() -> bool:
        try:
            return bool(names.addresses("host.example", 7, 300))
        except OSError:
            return False

    until(is_found, "the name is found")


def test_a_second_look_up_is_waited_for_as_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "_NAME_RETRY_SECONDS", 0.0)
    pause, calls = threading.Event(), 0

    def look_up(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        pause.wait(0.5)
        return KNOWN

    monkeypatch.setattr(name_lookup.socket, "getaddrinfo", look_up)
    names = NameLookup()
    with pytest.raises(OSError, match="Temporary failure"):
        names.addresses("host.example", 7, 300)
    assert names.addresses("host.example", 7, 300) == ((socket.AF_INET, ("127.0.0.1", 7)),)


def test_a_look_up_without_a_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(name_lookup.WorkerThread, "start", refuse)
    with pytest.raises(OSError, match="host.example can't be looked up now: the system has no thread left"):
        NameLookup().addresses("host.example", 7, 1e6)


def test_a_connection_is_made_to_a_name_and_to_a_numeric_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for host in ("localhost", "127.0.0.1"):
            with NameLookup().connect((host, port), 300) as connection:
                assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        NameLookup().connect(("127.0.0.1", port), 300)
