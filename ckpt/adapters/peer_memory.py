"""Serves steps from the memory of this host to other processes: no file system is shared, and no bytes are pickled.

The process that serves has a storage node in a folder of shared memory. A peer on the same host gets open files from it, and a
peer on another host reads over the network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ckpt.adapters.peer_address import PeerAddress, loopback_identity
from ckpt.aggregator.cluster.config import token_from_environment
from ckpt.storage.base.errors import InvalidArgument, StoreError
from ckpt.storage.base.store import Store
from ckpt.storage.member.device import Device
from ckpt.storage.node.client_credentials import is_loopback
from ckpt.storage.node.security_options import VARIABLES, NodeSecurity, read_certificate, security_from_environment
from ckpt.storage.node.server import NodeOptions, NodeServer
from ckpt.tiers.memory_folder import own_memory_folder

_PREFIX = "peer-"
_STALE_AFTER_SECONDS = 60.0
"""A younger folder without a lock may belong to a process that has just started."""


class PeerMemory:
    """A repository in shared memory that peers read by its `address`, until `close`. It is a context manager.

        memory = PeerMemory()
        ckpt.save(state, memory.store, step=3, group=None)
        ckpt.load(open_peer(memory.address), like=state, step=3, group=None)  # in another process

    host: the name or number by which peers reach this host. None means the host name if the environment has a certificate
        (CKPT_TLS_CERT_FILE) or allows access without TLS (CKPT_INSECURE=1), else only processes of this host are served.

    Peers on other hosts read over TLS: all processes need CKPT_TOKEN_FILE and CKPT_CA_FILE, and the one that serves also
    CKPT_TLS_CERT_FILE and CKPT_TLS_KEY_FILE. On this host alone, or with CKPT_INSECURE=1 and no certificate, the address has a
    random token, and whoever knows the address can read. Nobody can write.

    Raises:
        InvalidArgument: Other hosts are to be served, and the environment lacks a token, a certificate or a key.
        StoreError: The shared memory can't be used.
    """

    def __init__(self, host: str | None = None) -> None:
        security = security_from_environment()
        name = host or _default_host(security)
        if ":" in name and not name.startswith("["):
            name = f"[{name}]"
        certificate = _check_security(name, security)
        token = (token_from_environment() if certificate else None) or secrets.token_hex(16)
        base = own_memory_folder()
        _remove_stale(base)
        self._folder = Path(base, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        self._device = Device(self._folder)
        everywhere = "[::]" if ":" in name else "0.0.0.0"
        options = NodeOptions(tokens=lambda: (token,), certificate=certificate, read_only=True)
        self._server = NodeServer(self._device, name if is_loopback(name) else everywhere, 0, options)
        self.store: Store = self._device.store
        """Where the steps are saved."""
        self.address = str(
            PeerAddress(
                f"{name}:{self._server.port}",
                token=None if certificate and security.token else token,
                tls=certificate is not None,
                only_on=loopback_identity() if is_loopback(name) else "",
            )
        )
        """What a peer gives to `open_peer`."""
        self._free = weakref.finalize(self, _remove_folder, self._folder, os.getpid())

    def close(self) -> None:
        """Stop serving, and free the memory."""
        self._server.drain(0.0)
        self._server.shutdown()
        self._device.close()
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _default_host(security: NodeSecurity) -> str:
    name = socket.gethostname()
    if security.certificate or security.insecure:
        with suppress(OSError):
            socket.getaddrinfo(name, None)
            return name
    return "127.0.0.1"


def _check_security(host: str, security: NodeSecurity) -> tuple[bytes, bytes] | None:
    """Return the certificate and key with which to serve at `host`, None to serve without TLS."""
    if is_loopback(host) or (security.insecure and not security.certificate):
        return None
    if missing := security.missing_options(host, VARIABLES):
        raise InvalidArgument(
            f"other hosts could reach the memory of this process at {host}: set {missing} in the environment, or "
            "CKPT_INSECURE=1 to serve it without TLS"
        )
    return read_certificate(Path(security.certificate), Path(security.key), VARIABLES)


def _remove_folder(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child runs the finalizers of its parent, too
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(base: Path) -> None:
    """Remove the folders of killed processes, which have no lock any more."""
    for folder in base.glob(f"{_PREFIX}*"):
        with suppress(OSError, StoreError):
            if time.time() - folder.stat().st_mtime > _STALE_AFTER_SECONDS:
                device = Device(folder)
                device.lock()
                shutil.rmtree(folder, ignore_errors=True)
                device.close()
