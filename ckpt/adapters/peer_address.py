"""The address of a `PeerMemory`, which one process gives to another as a text, and the client that reads from it."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ckpt
from ckpt.aggregator.cluster.config import credentials_from_environment
from ckpt.errors import StepNotFound
from ckpt.storage.base.errors import InvalidArgument, Refused, Unavailable, Untrusted
from ckpt.storage.base.store import Store
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials, is_insecure_allowed, is_loopback
from ckpt.storage.node.security_options import VARIABLES, read_authority

_POLL_SECONDS = 0.02
_CALL_SECONDS = 30.0
"""The longest deadline of one call."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where and how a peer reads. As text: peer[+tls]://[TOKEN@]HOST:PORT[/LOOPBACK]."""

    host_port: str
    token: str | None = None
    """None means the token of the environment."""
    tls: bool = False
    only_on: str = ""
    """The loopback interface on which alone the memory is served, as `loopback_identity`; "" if others reach it, too."""

    def __str__(self) -> str:
        token = f"{self.token}@" if self.token else ""
        return f"peer{'+tls' if self.tls else ''}://{token}{self.host_port}/{self.only_on}"


def parse_peer_address(text: str) -> PeerAddress:
    """Return the address in a text; raise InvalidArgument for another text."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("peer", "peer+tls") and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        usable = False
    if not usable:
        raise InvalidArgument(f"{text.rpartition('@')[2]!r} is not an address of a PeerMemory: give the text of its `address`")
    token, _, host_port = parts.netloc.rpartition("@")
    return PeerAddress(host_port, token or None, parts.scheme == "peer+tls", parts.path.removeprefix("/"))


def loopback_identity() -> str:
    """Return the name of this host, and what distinguishes its loopback interface from those of other hosts and containers."""
    found = [socket.gethostname()]
    with suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(found)


def open_peer(address: str, timeout_seconds: float = _CALL_SECONDS) -> Store:
    """Return the store of a `PeerMemory` in another process; nothing is read yet.

    address: the text of `PeerMemory.address`.
    timeout_seconds: how long the caller waits. No call takes longer than that, or than 30 s.

    Raises:
        InvalidArgument: This is not an address, or a variable of the environment is missing.
        Refused: The memory is served only to processes of its own host, or without TLS.
    """
    peer = parse_peer_address(address)
    deadline_seconds = min(_CALL_SECONDS, max(0.001, timeout_seconds))
    if peer.only_on and peer.only_on != loopback_identity():
        raise Refused(
            f"{peer.only_on.partition('/')[0]} serves its memory only on its own host: set CKPT_TOKEN_FILE, "
            "CKPT_TLS_CERT_FILE, CKPT_TLS_KEY_FILE and CKPT_CA_FILE on all hosts, or CKPT_INSECURE=1"
        )
    if not peer.tls:
        if not is_loopback(peer.host_port.rpartition(":")[0]) and not is_insecure_allowed():
            raise Refused(
                f"{peer.host_port} serves its memory without TLS: set CKPT_TOKEN_FILE, CKPT_TLS_CERT_FILE, CKPT_TLS_KEY_FILE "
                "and CKPT_CA_FILE there, or CKPT_INSECURE=1 on all hosts"
            )
        if peer.token is None:
            raise InvalidArgument(
                f"the address {peer.host_port} of a PeerMemory lacks its token: give the whole text of its `address`"
            )
        return NodeStore(peer.host_port, NodeCredentials(peer.token, deadline_seconds=deadline_seconds, insecure=True))
    return NodeStore(peer.host_port, _tls_credentials(peer, deadline_seconds))


def _tls_credentials(peer: PeerAddress, deadline_seconds: float) -> NodeCredentials:
    file = os.environ.get(VARIABLES.authority)
    if not file:
        raise InvalidArgument(
            f"{peer.host_port} serves its memory with TLS: set CKPT_CA_FILE, its authority, in this process, too"
        )
    authority = read_authority(Path(os.path.expanduser(file)), VARIABLES.authority)
    credentials = credentials_from_environment()
    token = peer.token or credentials.token
    if token is None:
        raise InvalidArgument(f"{peer.host_port} serves its memory with a token: set CKPT_TOKEN_FILE in this process, too")
    return replace(credentials, token=token, ca=authority, deadline_seconds=deadline_seconds)


def load_from_peer(store: Store, step: int, timeout_seconds: float, what: str) -> Any:
    """Return the state of a step of a `PeerMemory`; wait for it until the timeout. what: the wait, for the message.

    Raises TimeoutError if the step does not arrive in time, Refused or Untrusted if this process may not read it.
    """
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            return ckpt.load(store, step=step, group=None)
        except Untrusted:
            raise
        except (StepNotFound, Unavailable) as error:
            if time.monotonic() >= end:
                reason = str(error) if isinstance(error, Unavailable) else "it has not been sent"
                raise TimeoutError(
                    f"timed out: {what} did not arrive within {timeout_seconds:g} s: {reason}; read the log of the sender, or "
                    "give a longer timeout"
                ) from error
            time.sleep(_POLL_SECONDS)
