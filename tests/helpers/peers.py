"""Processes that serve a state with `PeerMemory`, and a relay between them and a client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from helpers.certificates import certificates

TOKEN = "a token that is long enough"
MARK = b"these bytes must not be readable on the network"
NAMES = ("CKPT_TOKEN", "CKPT_TOKEN_FILE", "CKPT_TLS_CERT_FILE", "CKPT_TLS_KEY_FILE", "CKPT_CA_FILE", "CKPT_INSECURE")
"""The variables that protect a peer."""

PROGRAM = f"""
import sys, numpy as np, ckpt
from ckpt.adapters.peer_memory import PeerMemory
with PeerMemory(sys.argv[1] or None) as memory:
    state = {{"w": np.arange(8 << 20, dtype=np.uint32), "mark": np.frombuffer({MARK!r} * 1000, np.uint8)}}
    ckpt.save(state, memory.store, step=3, group=None, codec="none")
    print(memory.address, flush=True)
    sys.stdin.read()
"""


def unprotected_environment() -> dict[str, str]:
    """Return the environment of this process without the variables that protect a peer."""
    return {name: value for name, value in os.environ.items() if name not in NAMES}


def tls_variables(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1", days: int = 1) -> dict[str, str]:
    """Return the variables of a peer with a new certificate in a folder."""
    folder.mkdir()
    certificate, key = certificates(folder, names, days)
    token = folder / "token"
    token.write_text(TOKEN)
    return {
        "CKPT_TOKEN_FILE": str(token), "CKPT_TLS_CERT_FILE": str(certificate), "CKPT_TLS_KEY_FILE": str(key),
        "CKPT_CA_FILE": str(certificate),
    }  # fmt: skip


def server_command(host: str) -> list[str]:
    """Return the command of a process that serves step 3 and prints its address."""
    return [sys.executable, "-c", PROGRAM, host]


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the address that a server prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Relay:
    """Passes bytes between clients and a server, and notes them. It is a context manager.

    cut_after, silent_after: bytes from the server after which all connections end, or nothing more is passed.
    """

    def __init__(self, to: str, cut_after: int | None = None, silent_after: int | None = None) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self._cut_after, self._silent_after = cut_after, silent_after
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = bytearray()
        """What the server has sent."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                self._sockets += [client, server]
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, noted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if noted:
                    with self._lock:
                        self.passed += data
                    if self._cut_after is not None and len(self.passed) > self._cut_after:
                        return self.close()
                    if self._silent_after is not None and len(self.passed) > self._silent_after:
                        continue
                to.sendall(data)
        for each in (source, to):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
