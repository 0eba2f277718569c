"""`NameLookup`: the addresses of host names, looked up in threads of their own, so that a caller chooses how long it waits."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from dataclasses import dataclass, field

from ckpt.storage.base.threads import WorkerThread

SocketAddress = tuple[int, tuple[object, ...]]
"""Family and address, as `socket` uses them."""

_KEEP_SECONDS = 60.0
"""An address that was found is looked up again after this time."""
_NAME_RETRY_SECONDS = 5.0
"""A look-up that failed, or whose address does not answer, is repeated after this time."""


@dataclass(slots=True)
class _Name:
    addresses: tuple[SocketAddress, ...] = ()
    error: str = ""
    """Why the last look-up failed; "" if it did not."""
    due_at: float = 0.0
    """When the name is looked up again, by CLOCK_MONOTONIC."""
    is_lookup_running: bool = False
    lookup_ended: threading.Event = field(default_factory=threading.Event)
    """Set while no look-up runs, once there was one."""


class NameLookup:
    """The addresses of host names. An address that was found is kept until a later look-up finds another one.

    All methods are safe from several threads. Numeric addresses need no look-up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards `_names`. Guards changes of the fields of its values."""
        self._names: dict[tuple[str, int], _Name] = {}

    def addresses(self, name: str, port: int, seconds: float = 0.0) -> tuple[SocketAddress, ...]:
        """Return the addresses of a name that are known. Raises OSError if none are.

        seconds: how long to wait if none are known yet.
        """
        if is_numeric_address(name):
            return _look_up(name, port)
        with self._lock:
            entry = self._names.setdefault((name, port), _Name())
            if not entry.is_lookup_running and time.monotonic() >= entry.due_at:
                self._start(name, port, entry)
            is_lookup_running = entry.is_lookup_running
        if not entry.addresses and is_lookup_running:
            entry.lookup_ended.wait(seconds)
        with self._lock:
            if entry.addresses:
                return entry.addresses
            if not entry.is_lookup_running and not entry.error:
                raise OSError(f"{name} can't be looked up now: the system has no thread left")
            raise OSError(entry.error or f"the name server does not answer about {name}")

    def connect(self, address: tuple[str, int], seconds: float, source_address: tuple[str, int] | None = None) -> socket.socket:
        """Return a connection, as socket.create_connection does. Raises OSError.

        seconds: the time for all addresses of the name together, and for each later call of the connection.
        """
        until = time.monotonic() + seconds
        error = OSError(f"{address[0]} has no address")
        addresses = self.addresses(*address, seconds)
        for number, (family, sockaddr) in enumerate(addresses):
            share = max(0.01, until - time.monotonic()) / (len(addresses) - number)
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
                try:
                    connection.settimeout(share)
                    if source_address is not None:
                        connection.bind(source_address)
                    connection.connect(sockaddr)
                    connection.settimeout(seconds)
                except BaseException:
                    connection.close()
                    raise
                return connection
            except OSError as failure:
                error = failure
        self._expire(*address)
        raise error

    def _expire(self, name: str, port: int) -> None:
        """Look a name up again soon: its address does not answer, so it may have changed."""
        with self._lock:
            if (entry := self._names.get((name, port))) is not None:
                entry.due_at = min(entry.due_at, time.monotonic() + _NAME_RETRY_SECONDS)

    def _start(self, name: str, port: int, entry: _Name) -> None:
        """Look a name up in a thread. The lock is held."""
        thread = WorkerThread(target=self._run, args=(name, port, entry), name="ckpt-names", daemon=True)
        try:
            entry.lookup_ended.clear()
            thread.start()
            entry.is_lookup_running, entry.error = True, ""
        except (RuntimeError, MemoryError):  # no thread is left now; the next call tries again
            pass

    def _run(self, name: str, port: int, entry: _Name) -> None:
        found, error = entry.addresses, ""
        try:
            found = _look_up(name, port)
        except (OSError, UnicodeError, MemoryError) as failure:  # e.g. the name is unknown, or no name server answers
            error = str(getattr(failure, "strerror", None) or failure) or "there is no memory to look it up"
        with self._lock:
            entry.addresses, entry.error, entry.is_lookup_running = found, error, False
            entry.due_at = time.monotonic() + (_NAME_RETRY_SECONDS if error else _KEEP_SECONDS)
        entry.lookup_ended.set()


def _look_up(name: str, port: int) -> tuple[SocketAddress, ...]:
    infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return tuple((family, sockaddr) for family, _, _, _, sockaddr in infos)


def is_numeric_address(name: str) -> bool:
    """Return whether a host is given by its IP address, which needs no look-up."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
