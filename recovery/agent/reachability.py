"""Finds out which machines are reachable: those that accept or refuse a TCP connection.

The kernel of a machine does both, even if its processes are busy or stopped. So the machine of a stopped server is reachable,
and a refused connection proves as much as an accepted one.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.storage.base.name_lookup import NameLookup, is_numeric_address
from ckpt.storage.node.client_credentials import is_loopback

_UNREACHABLE_ERRORS = {
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN,
    errno.EINVAL, errno.EACCES,  # routes of the kinds "blackhole" and "prohibit"
}  # fmt: skip
"""Errors that mean that no packet reaches the machine. Other errors, as a lack of descriptors, prove nothing."""

_CACHE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Address:
    """A numeric address and a port."""

    family: int
    sockaddr: tuple[object, ...]
    """The address in the form that `socket` uses."""

    @property
    def machine(self) -> str:
        """The numeric address without the port."""
        return str(self.sockaddr[0])


class AddressCache:
    """The addresses of host names. They are cached, because a host that is cut off can't look up names.

    Only the thread that publishes reports uses it. The look-ups themselves run in another thread.
    """

    def __init__(self) -> None:
        self._names = NameLookup()
        self._cache: dict[tuple[str, int], tuple[float, tuple[Address, ...]]] = {}

    def look_up(self, name: str, port: int) -> tuple[Address, ...]:
        """Return the addresses of a name that belong to other machines, without a wait.

        If they are not known yet, or the look-up fails, the cached addresses are returned.
        """
        now = time.monotonic()
        at, found = self._cache.get((name, port), (-_CACHE_SECONDS, ()))
        if now - at < (float("inf") if found and is_numeric_address(name) else _CACHE_SECONDS):
            return found
        try:
            addresses = [Address(family, sockaddr) for family, sockaddr in self._names.addresses(name, port)]
            found = tuple(address for address in addresses if _is_other_machine(address))
        except OSError:  # the name server has not answered yet, or does not know the name
            return found
        self._cache[name, port] = now, found
        return found


def find_unreachable(addresses: Iterable[Address], seconds: float) -> frozenset[Address]:
    """Return the addresses that neither accept nor refuse a connection within some seconds. All are tried at once."""
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
            if remaining <= 0:  # after a last poll without a wait: answers count that arrived while this process did not run
                break
        return frozenset(unreachable | {address for _, address in pending.values()})
    finally:
        for tried, _ in pending.values():
            tried.close()


def _is_other_machine(address: Address) -> bool:
    """Return whether an address belongs to another machine: packets to it have another source address."""
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        probe.connect(address.sockaddr)  # sends nothing
        return str(probe.getsockname()[0]) != address.machine and not is_loopback(address.machine)
