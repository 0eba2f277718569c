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

from ckpt.storage.base.errors import InvalidArgument, StoreError
from ckpt.storage.base.store import Store
from ckpt.storage.member.device import Device
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.credentials import NodeCredentials
from ckpt.storage.node.server import NodeOptions, NodeServer
from ckpt.tiers.tier_spec import own_memory_folder

_PREFIX = "peer-"
_STALE_AFTER_SECONDS = 60.0
"""A younger folder without a lock may belong to a process that has just started."""


class PeerMemory:
    """A repository in shared memory that peers read by its `address`, until `close`. It is a context manager.

        memory = PeerMemory()
        ckpt.save(state, memory.store, step=3, group=None)
        ckpt.load(open_peer(memory.address), like=state, step=3, group=None)  # in another process

    host: the name or number by which peers reach this host. None means its host name if that has an address, else only
        processes of this host are served. Whoever knows the address, which has a random token, can read; nobody can write. The
        network traffic is not encrypted.

    Raises StoreError if the memory can't be used.
    """

    def __init__(self, host: str | None = None) -> None:
        base = own_memory_folder()
        _remove_stale(base)
        self._folder = Path(base, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
        self._device = Device(self._folder)
        token = secrets.token_hex(16)
        name = host or _reachable_name()
        everywhere = "[::]" if ":" in name else "0.0.0.0"
        listen = name if name in ("127.0.0.1", "localhost", "[::1]") else everywhere
        self._server = NodeServer(self._device, listen, 0, NodeOptions(tokens=lambda: (token,), read_only=True))
        self.store: Store = self._device.store
        """Where the steps are saved."""
        self.address = f"{token}@{name}:{self._server.port}"
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


def open_peer(address: str, deadline_seconds: float = 30.0) -> Store:
    """Return the store of a `PeerMemory` in another process; nothing is read yet. deadline_seconds: of each call."""
    token, separator, where = address.partition("@")
    if not separator:
        raise InvalidArgument(f"{address!r} is no address of a PeerMemory: give what its `address` is")
    return NodeStore(where, NodeCredentials(token, deadline_seconds=deadline_seconds, insecure=True))


def _reachable_name() -> str:
    name = socket.gethostname()
    with suppress(OSError):
        socket.getaddrinfo(name, None)
        return name
    return "127.0.0.1"


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
