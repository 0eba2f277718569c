"""Which machines can be reached over the network: a TCP connection to them is accepted or refused.

The kernel of a machine does both, however busy or stopped its processes are. So a server that stands still is in reach, and a
port on which nothing listens proves as much as one that is open.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt.storage.node.credentials import is_loopback

_UNREACHABLE_ERRORS = {
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN,
    errno.EINVAL, errno.EACCES,  # routes of the kinds "blackhole" and "prohibit"
}  # fmt: skip
"""Errors that say that nothing gets there. Others are of this process, as a lack of descriptors, and prove nothing."""

_CACHE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address and a port."""

    family: int
    sockaddr: tuple[Any, ...]
    """As `socket` takes it."""

    @property
    def machine(self) -> str:
        """Without the port."""
        return str(self.sockaddr[0])


class AddressCache:
    """The addresses behind names. They are remembered, as a host that is cut off can look up no names."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, int], tuple[float, tuple[Address, ...]]] = {}

    def look_up(self, name: str, port: int) -> tuple[Address, ...]:
        """Those that other machines have. A look-up may take long; where it fails, what was known before stays known."""
        now = time.monotonic()
        at, found = self._cache.get((name, port), (-_CACHE_SECONDS, ()))
        if now - at < (float("inf") if found and _is_numeric(name) else _CACHE_SECONDS):
            return found
        try:
            named = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            found = tuple(address for family, _, _, _, place in named if _is_other_machine(address := Address(family, place)))
        except (OSError, UnicodeError):  # no server of names answers, or it is no name
            pass
        self._cache[name, port] = now, found
        return found


def find_unreachable(addresses: Iterable[Address], seconds: float) -> frozenset[Address]:
    """Those that neither accept nor refuse a connection within some seconds. All are tried at once."""
    poll, pending, unreachable = select.poll(), dict[int, tuple[socket.socket, Address]](), set[Address]()
    try:
        for address in set(addresses):
            try:
                tried = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError:
                continue
            pending[tried.fileno()] = tried, address
            if (error := tried.connect_ex(address.sockaddr)) == errno.EINPROGRESS:
                poll.register(tried, select.POLLOUT)
                continue
            pending.pop(tried.fileno())[0].close()
            if error in _UNREACHABLE_ERRORS:
                unreachable.add(address)
        until = time.monotonic() + seconds
        while pending:
            remaining = until - time.monotonic()
            for number, _ in poll.poll(max(0, round(remaining * 1000))):
                poll.unregister(number)
                tried, address = pending.pop(number)
                if tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _UNREACHABLE_ERRORS:
                    unreachable.add(address)
                tried.close()
            if remaining <= 0:  # what the kernel has heard of late counts, too, where this process did not get to run
                break
        return frozenset(unreachable | {address for _, address in pending.values()})
    finally:
        for tried, _ in pending.values():
            tried.close()


def _is_numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_other_machine(address: Address) -> bool:
    """Whether it is one of another machine: what this machine sends there does not begin where it ends."""
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        probe.connect(address.sockaddr)  # sends nothing
        return str(probe.getsockname()[0]) != address.machine and not is_loopback(address.machine)
