"""A process that serves folders in the memory of this host as storage nodes, to the ranks of all hosts of a run.

Each node is a folder that is named by its port. What is in it outlives the process, and its caller: the next one serves the
same folders at the same ports. It is told what to do by lines on its standard input, and ends with it.

    in   fresh               one node more, empty
         drop HOST:PORT      end it, and remove what it holds
    out  serves HOST:PORT    of a folder that was there
         ready               these are all
         fresh HOST:PORT     the one that was asked for
         fails REASON
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckpt.recovery.ranks import processes
from ckpt.storage.base.errors import CkptError, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.node.credentials import is_loopback

if TYPE_CHECKING:
    from ckpt.storage.member.device import Device
    from ckpt.storage.node.server import NodeOptions, NodeServer

log = logging.getLogger("ckpt.run")

_RESTART_SECONDS = 1.0
"""After it has ended by itself."""
_FRESH_SECONDS = 20.0
"""Who is not ready after so long is not waited for."""
_PROCESS_END_SECONDS = 2.0
"""The process before may take so long to end."""


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """What keeps strangers out of nodes that other hosts can reach. The token is that of the clients, in the environment."""

    token: bool = False
    """Whether there is one."""
    certificate: str = ""
    """File of the chain, PEM; `key` belongs to it."""
    key: str = ""
    authority: str = ""
    """File of who has signed the certificates of all hosts: clients speak TLS then."""
    insecure: bool = False

    def missing_options(self, address: str) -> str:
        """The options that are missing for nodes at this address; "" none."""
        tls = {"--tls-cert": self.certificate, "--tls-key": self.key, "--ca-file": self.authority}
        lacking = [name for name, file in tls.items() if not file]
        if self.insecure or is_loopback(address):  # all of it, or nothing
            return ", ".join(lacking) if len(lacking) < len(tls) else ""
        return ", ".join(lacking if self.token else ["--token-file", *lacking])


class MemoryNodes:
    """Its caller's side; all but `look` and `close` may be read at any time. Nothing here waits but `close`."""

    def __init__(self, folder: Path, address: str, security: NodeSecurity) -> None:
        self.nodes: tuple[str, ...] = ()
        """HOST:PORT of all that are served."""
        self.fresh = ""
        """One of them, that is empty."""
        self.folder = folder
        """In the memory of this host, with all that the nodes hold."""
        self._host = f"[{address}]" if ":" in address else address
        self._configuration = json.dumps([str(folder), address, security.certificate, security.key])
        self._ready = self._fresh_requested = False
        self._fresh_missing_since = time.monotonic()
        self._retry_at = 0.0
        self._last_warning = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def state(self) -> Literal["off", "coming", "ready"]:
        """Whether there is a fresh node, or will be in a moment."""
        if self._ready and self.fresh in self.nodes:
            return "ready"
        return "coming" if time.monotonic() - self._fresh_missing_since < _FRESH_SECONDS else "off"

    def update(self, used_nodes: Collection[str]) -> None:
        """Hear what it says, and see to it that one node is fresh, and no node is there for nothing. Call it often.

        named: the nodes that are in use, or may be.
        """
        now = time.monotonic()
        self._read_lines()
        if self._process is None:
            if now >= self._retry_at:
                self._start()
            return
        if not self._ready:
            return
        if self.fresh in used_nodes:
            self.fresh, self._fresh_missing_since = "", now
        for at in self.nodes:
            if at not in used_nodes and at != self.fresh:
                self._send_line(f"drop {at}")
        self.nodes = tuple(at for at in self.nodes if at in used_nodes or at == self.fresh)
        if self.fresh not in self.nodes and not self._fresh_requested and now >= self._retry_at:
            self._fresh_requested = True
            self._send_line("fresh")

    def node_address(self, path: Path) -> str:
        """HOST:PORT of the node whose folder this is."""
        return f"{self._host}:{path.name}"

    def close(self, remove: bool) -> None:
        """End it. free: and remove all that it holds."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_PROCESS_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        command = [sys.executable, "-m", "ckpt.recovery.memory_tier.memory_nodes"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        except OSError as error:
            self._handle_end(f"can't be started: {error.strerror}")
            return
        assert self._process.stdout is not None
        processes.register_child(self._process.pid)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._received, self._ready, self._fresh_requested = b"", False, False
        self._send_line(self._configuration)

    def _read_lines(self) -> None:
        if self._process is None:
            return
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 65536):
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            kind, _, what = line.decode().partition(" ")
            if kind == "ready":
                self._ready = True
            elif kind == "fails":
                self._warn(what)
                self._fresh_requested, self._retry_at = False, time.monotonic() + _RESTART_SECONDS
            else:
                self.nodes = tuple(sorted({*self.nodes, what}))
            if kind == "fresh":
                self.fresh, self._fresh_requested = what, False
        if (status := self._process.poll()) is not None:
            self._handle_end(f"has ended with status {status}")

    def _handle_end(self, what: str) -> None:
        now = time.monotonic()
        if self._ready:  # it may come back as it went
            self._fresh_missing_since = now
        self._process, self.nodes, self._ready = None, (), False
        self._retry_at = now + _RESTART_SECONDS
        self._warn(f"the process that serves it {what}; it is started again")

    def _warn(self, what: str) -> None:
        if what != self._last_warning:
            log.warning("the memory of this host: %s", what)
        self._last_warning = what

    def _send_line(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and is started again
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())


# --- the other side ----------------------------------------------------------------------------------------------


class _ServedNodes:
    def __init__(self, folder: Path, address: str, options: NodeOptions) -> None:
        self._folder = folder
        self._address = address
        self._host = f"[{address}]" if ":" in address else address
        self._options = options
        self._servers: dict[str, tuple[NodeServer, Device]] = {}

    def serve_existing(self) -> None:
        for path in sorted(self._folder.glob("*")):  # none where nothing was kept yet
            if path.name.isdigit():
                try:
                    print("serves", self._serve_folder(path, time.monotonic() + _PROCESS_END_SECONDS), flush=True)
                except (CkptError, OSError) as error:
                    print(f"fails {path} can't be served: {_one_line(error)}", flush=True)

    def create(self) -> str:
        for _ in range(20):
            with socket.create_server((self._address, 0), family=self._family) as found:
                path = self._folder / str(found.getsockname()[1])
            if not path.exists():  # else one that could not be served had this port
                return self._serve_folder(path)
        raise StoreError(f"no port of {self._address} is free")

    def drop(self, at: str) -> None:
        """Without waiting for its callers."""
        server, device = self._servers.pop(at)
        threading.Thread(target=_remove_node, args=(server, Path(device.path)), daemon=True).start()

    @property
    def _family(self) -> int:
        return socket.AF_INET6 if ":" in self._address else socket.AF_INET

    def _serve_folder(self, path: Path, until: float = 0.0) -> str:
        from ckpt.storage.member.device import Device
        from ckpt.storage.node.server import NodeServer

        port = int(path.name)
        while True:
            try:
                with socket.create_server((self._address, port), family=self._family):
                    pass  # gRPC would share the port with whoever else of this user listens there
                device = Device(path)
                server = NodeServer(device, self._host, port, self._options)
                break
            except (StoreError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        at = f"{self._host}:{server.port}"
        self._servers[at] = server, device
        failpoint("keeper.serves")
        return at


def nodes_with_objects(folder: Path) -> list[Path]:
    """The nodes in the memory of this host that hold any object. Raises StoreError where that can't be read."""
    from ckpt.storage.local.directory import LocalStore
    from ckpt.storage.member.device import OBJECTS

    with contextlib.suppress(FileNotFoundError):
        nodes = [path for path in sorted(folder.iterdir()) if path.name.isdigit()]
        return [path for path in nodes if next(iter(LocalStore(path / OBJECTS).list()), None) is not None]
    return []


def _remove_node(server: NodeServer, path: Path) -> None:
    server.drain(0.0)
    server.shutdown()
    shutil.rmtree(path, ignore_errors=True)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def serve_nodes() -> None:
    """Serve until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)

    from ckpt.aggregator.cluster.config import token_from_environment
    from ckpt.storage.node.server import NodeOptions

    folder, address, certificate, key = json.loads(sys.stdin.readline())
    token = token_from_environment()
    options = NodeOptions(
        tokens=(lambda: (token,)) if token else None,
        certificate=(Path(certificate).read_bytes(), Path(key).read_bytes()) if certificate else None,
    )
    nodes = _ServedNodes(Path(folder), address, options)
    nodes.serve_existing()
    print("ready", flush=True)
    for line in sys.stdin:
        kind, _, what = line.strip().partition(" ")
        try:
            if kind == "fresh":
                print("fresh", nodes.create(), flush=True)
            else:
                nodes.drop(what)
        except (CkptError, OSError) as error:
            print(f"fails {_one_line(error)}", flush=True)
    os._exit(0)  # what is half-written is no more when its folder is served again


if __name__ == "__main__":
    serve_nodes()
