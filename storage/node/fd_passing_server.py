"""The server side of descriptor passing: a node sends open file descriptors to clients on its host.

So the bytes of these clients do not go over the network. A node listens on an AF_UNIX socket with an abstract name, which
another host or another network namespace can't reach. A client gets the name and a secret over the wire, protected by token and
TLS. It connects, and each side sends one packet:

    request  code, 16 random bytes, [verb, argument]     verb "open": the name of an object; "append": the key of an upload
    answer   code, [number, error]                       with this number of descriptors (SCM_RIGHTS, see unix(7))

A code is the HMAC-SHA256 of the bytes after it; the code of an answer also covers the random bytes of the request. So each side
verifies the other, and a process that takes the socket name of an ended node learns nothing.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue

from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.threads import start_or_raise
from ckpt.storage.node import wire

log = logging.getLogger("ckpt.node")

_CODE_BYTES = 32
_NONCE_BYTES = 16
_PACKET_BYTES = 16 << 10
_MAX_DESCRIPTORS = 4
"""The most descriptors of one answer."""
_THREADS = 4
_MAX_SILENT_PEERS = 256
"""If more connections than this wait without a request, all of them are closed."""
_BACKLOG = 256
_REQUEST_SECONDS = 1.0
"""How long a client may take to send its request."""


@dataclass(frozen=True, slots=True)
class FdServerAddress:
    """Where and how a client gets descriptors from a node."""

    socket_name: str
    secret: bytes
    lease_seconds: float
    """How long the node keeps an upload without a call of its client."""


def _authentication_code(secret: bytes, side: bytes, what: bytes) -> bytes:
    return hmac.digest(secret, side + what, "sha256")


def request_descriptors(address: FdServerAddress, verb: str, argument: str, seconds: float) -> list[int]:
    """Return descriptors of the node at an address; the caller closes them.

    Raises the error that the node reports, ConnectionError if no process with the secret listens, TimeoutError if no answer
    arrives within `seconds`, and another OSError if descriptors can't be passed.
    """
    request = secrets.token_bytes(_NONCE_BYTES) + wire.pack([verb, argument])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(seconds)
        peer.connect(f"\0{address.socket_name}")
        peer.send(_authentication_code(address.secret, b"client", request) + request)
        found = array("i")
        space = socket.CMSG_LEN(_MAX_DESCRIPTORS * found.itemsize)
        packet, ancillary, _, _ = peer.recvmsg(_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)  # socket.recv_fds drops the flag
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
    code, answer = packet[:_CODE_BYTES], packet[_CODE_BYTES:]
    try:
        if not hmac.compare_digest(code, _authentication_code(address.secret, b"node", request[:_NONCE_BYTES] + answer)):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the process that answers does not have the secret")
        count, node_error = wire.unpack(answer)
        if node_error:
            raise wire.decode_error(node_error) or StoreError(f"it can't {verb} {argument}; see its log")
        if len(found) != count:  # this process has too many open files, or may not receive descriptors
            raise OSError(errno.EMFILE, f"received {len(found)} of {count} descriptors")
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    return list(found)


class FdPassingServer:
    """Sends descriptors to clients until `close`.

    open_descriptors: opens what a verb and its argument name; the descriptors are open while the context lasts.
    tokens: returns the tokens that clients of the wire must have; when they change, the secret changes, too.

    Raises OSError if the system has no such sockets, and StoreError if it has no threads left.
    """

    def __init__(
        self, open_descriptors: Callable[[str, str], AbstractContextManager[Sequence[int]]], lease_seconds: float,
        tokens: Callable[[], tuple[str, ...]],
    ) -> None:  # fmt: skip
        self._socket_name = f"ckpt-node-{secrets.token_hex(16)}"
        self._key = secrets.token_bytes(32)
        self._lease_seconds = lease_seconds
        self._tokens = tokens
        self._open_descriptors = open_descriptors
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self._socket_name}")
        self._listener.listen(_BACKLOG)
        self._ready_peers: SimpleQueue[socket.socket | None] = SimpleQueue()
        try:
            for work in (self._accept_peers, *[self._serve_peers] * _THREADS):
                start_or_raise(threading.Thread(target=work, name="ckpt-node-fd", daemon=True), "clients of this host")
        except StoreError:
            self.close()
            raise

    @property
    def address(self) -> FdServerAddress:
        """The address that the node gives to its clients over the wire."""
        secret = hmac.digest(self._key, "\n".join(self._tokens()).encode(), "sha256")
        return FdServerAddress(self._socket_name, secret, self._lease_seconds)

    def _accept_peers(self) -> None:
        """Accept connections, and pass each to the serving threads when its request arrives; so a silent one blocks none."""
        silent: dict[socket.socket, float] = {}
        with self._listener, selectors.DefaultSelector() as selector:

            def remove(peer: socket.socket) -> socket.socket:
                del silent[peer]
                selector.unregister(peer)
                return peer

            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                ready = {key.fileobj for key, _ in selector.select(_REQUEST_SECONDS)}
                for peer in [p for p in silent if p in ready]:
                    self._ready_peers.put(remove(peer))
                oldest_allowed = time.monotonic() - _REQUEST_SECONDS
                for peer in [p for p, since in silent.items() if since < oldest_allowed or len(silent) > _MAX_SILENT_PEERS]:
                    remove(peer).close()
                if self._listener in ready:
                    try:
                        peer, _ = self._listener.accept()
                        selector.register(peer, selectors.EVENT_READ)
                    except OSError:  # the listener is closed, or a limit of this process or user is reached
                        time.sleep(0.1)
                        continue
                    silent[peer] = time.monotonic()
        for peer in silent:
            peer.close()
        for _ in range(_THREADS):
            self._ready_peers.put(None)

    def _serve_peers(self) -> None:
        while (peer := self._ready_peers.get()) is not None:
            try:
                with peer, suppress(OSError):  # the client may have closed the connection
                    self._answer(peer)
            except Exception:  # e.g. no memory: this thread must serve the next client
                log.exception("a request for descriptors failed")

    def _answer(self, peer: socket.socket) -> None:
        peer.settimeout(_REQUEST_SECONDS)
        packet = peer.recv(_PACKET_BYTES)
        code, request = packet[:_CODE_BYTES], packet[_CODE_BYTES:]
        secret = self.address.secret
        if not hmac.compare_digest(code, _authentication_code(secret, b"client", request)):
            return
        with ExitStack() as open_files:
            found: Sequence[int] = ()
            encoded_error = b""
            try:
                verb, argument = wire.unpack(request[_NONCE_BYTES:])
                found = open_files.enter_context(self._open_descriptors(verb, argument))
            except CkptError as error:
                encoded_error = wire.encode_error(error)
            except Exception as error:
                log.exception("%s failed", request[_NONCE_BYTES:])
                encoded_error = wire.encode_error(StoreError(f"the node failed: {error}; see its log"))
            answer = wire.pack([len(found), encoded_error])
            socket.send_fds(peer, [_authentication_code(secret, b"node", request[:_NONCE_BYTES] + answer) + answer], found)

    def close(self) -> None:
        """Stop listening, and end the threads."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread


def start_fd_passing(
    open_descriptors: Callable[[str, str], AbstractContextManager[Sequence[int]]], lease_seconds: float,
    tokens: Callable[[], tuple[str, ...]] = tuple,
) -> FdPassingServer | None:  # fmt: skip
    """Return a server of descriptors; None if this system has no such sockets. Raises StoreError if it has no threads left."""
    if sys.platform != "linux":
        return None
    try:
        return FdPassingServer(open_descriptors, lease_seconds, tokens)
    except OSError as error:
        log.info("clients of this host read and write over the wire, not through descriptors: %s", error)
        return None
