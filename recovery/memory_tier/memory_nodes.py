"""The process that serves folders in the memory of this host as storage nodes, and the agent's side of it.

The ranks of all hosts of a run use the nodes. The folder of each node is named by its port. It outlives the process and the
agent: the next process serves the same folders at the same ports. The process reads commands as lines from its standard
input, and ends when that closes. The first line is its configuration.

    in   fresh               start one more node, empty
         drop HOST:PORT      end a node, and remove its data
    out  serves HOST:PORT    a node of an existing folder is served
         ready               all existing folders are served
         fresh HOST:PORT     the requested node is served
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
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckpt.recovery.ranks import process_kill
from ckpt.storage.base.background_stderr import write_stderr_in_background
from ckpt.storage.base.errors import CkptError, StoreError, is_transient
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.threads import DaemonThreadPool
from ckpt.storage.node.security_options import NodeSecurity

if TYPE_CHECKING:
    from ckpt.storage.member.device import Device
    from ckpt.storage.node.server import NodeOptions, NodeServer

log = logging.getLogger("ckpt.run")

_RESTART_SECONDS = 1.0
"""The pause before a process that has ended by itself is started again."""
_FRESH_SECONDS = 20.0
"""How long a fresh node is awaited. After that the host counts as one without a node."""
_REMOVAL_THREADS = 4
"""How many dropped nodes are removed at a time."""
_PROCESS_END_SECONDS = 2.0
"""How long an earlier process may take to end and to free its ports."""


class MemoryNodes:
    """The agent's side of the process. Only `close` and `remove` wait. The main thread calls the methods."""

    def __init__(self, folder: Path, address: str, security: NodeSecurity) -> None:
        self.nodes: tuple[str, ...] = ()
        """HOST:PORT of all nodes that are served."""
        self.fresh = ""
        """The one of them that is empty and that no attempt has used; "" none."""
        self.folder = folder
        """The folder in the memory of this host with the data of all nodes."""
        self._host = f"[{address}]" if ":" in address else address
        self._configuration = json.dumps([str(folder), address, security.certificate, security.key])
        self._ready = self._fresh_requested = False
        self._fresh_missing_since = time.monotonic()
        self._retry_at = 0.0
        self._last_warning = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""  # of the process: the beginning of a line
        self._start()

    @property
    def state(self) -> Literal["off", "coming", "ready"]:
        """ready: there is a fresh node. coming: there will be one in a moment. off: neither."""
        if self._ready and self.fresh in self.nodes:
            return "ready"
        return "coming" if time.monotonic() - self._fresh_missing_since < _FRESH_SECONDS else "off"

    def update(self, used_nodes: Collection[str]) -> None:
        """Read answers of the process, request a fresh node if there is none, and drop nodes that are not used.

        The agent calls this several times a second.

        used_nodes: HOST:PORT of the nodes that are in use, or may be.
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
        for node in self.nodes:
            if node not in used_nodes and node != self.fresh:
                self._send_line(f"drop {node}")
        self.nodes = tuple(node for node in self.nodes if node in used_nodes or node == self.fresh)
        if self.fresh not in self.nodes and not self._fresh_requested and now >= self._retry_at:
            self._fresh_requested = True
            self._send_line("fresh")

    def node_address(self, path: Path) -> str:
        """Return HOST:PORT of the node with this folder."""
        return f"{self._host}:{path.name}"

    def close(self) -> None:
        """End the process. The data of the nodes stays."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_PROCESS_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                process_kill.wait_for_killed(self._process)

    def remove(self) -> None:
        """Delete the data of all nodes, after `close`."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "ckpt.recovery.memory_tier.memory_nodes"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=process_kill.die_with_parent,
            )
        except OSError as error:
            self._handle_end(f"can't be started: {error.strerror}")
            return
        assert self._process.stdout is not None
        process_kill.register_child(self._process.pid)
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
            self._handle_line(line.decode())
        if (status := self._process.poll()) is not None:
            self._handle_end(f"has ended with status {status}")

    def _handle_line(self, line: str) -> None:
        kind, _, text = line.partition(" ")
        if kind == "ready":
            self._ready = True
        elif kind == "fails":
            self._warn(text)
            self._fresh_requested, self._retry_at = False, time.monotonic() + _RESTART_SECONDS
        else:
            self.nodes = tuple(sorted({*self.nodes, text}))
        if kind == "fresh":
            self.fresh, self._fresh_requested = text, False

    def _handle_end(self, text: str) -> None:
        """Note that the process has ended, for a restart after a pause. text: what happened to it."""
        now = time.monotonic()
        if self.state == "ready":  # a process that had a fresh node will probably have one again after the restart
            self._fresh_missing_since = now
        self._process, self.nodes, self._ready = None, (), False
        self._retry_at = now + _RESTART_SECONDS
        self._warn(f"the process that serves it {text}; it is started again")

    def _warn(self, text: str) -> None:
        if text != self._last_warning:
            log.warning("the memory of this host: %s", text)
        self._last_warning = text

    def _send_line(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, and will be started again
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())


# --- in the process ----------------------------------------------------------------------------------------------


class _ServedNodes:
    """The nodes that this process serves."""

    def __init__(self, folder: Path, address: str, options: NodeOptions) -> None:
        self._folder = folder
        self._address = address
        self._host = f"[{address}]" if ":" in address else address
        self._options = options
        self._servers: dict[str, tuple[NodeServer, Device]] = {}
        self._removals = DaemonThreadPool(_REMOVAL_THREADS, "ckpt-drop")
        self._removals.submit(lambda: None)  # its first thread starts now: later the system may have none left

    def serve_existing(self) -> None:
        """Serve the nodes of all existing folders, and print the result of each."""
        for path in sorted(self._folder.glob("*")):
            if path.name.isdigit():
                try:
                    print("serves", self._serve_folder(path, time.monotonic() + _PROCESS_END_SECONDS), flush=True)
                except Exception as error:
                    print(f"fails {path} can't be served: {_expected_reason(error)}", flush=True)

    def create(self) -> str:
        """Serve a new, empty node and return its HOST:PORT."""
        for _ in range(20):
            with socket.create_server((self._address, 0), family=self._family) as probe:
                path = self._folder / str(probe.getsockname()[1])
            if not path.exists():  # a folder with this port belongs to a node that could not be served
                return self._serve_new(path)
        raise StoreError(f"no port of {self._address} is free: end processes that listen there")

    def _serve_new(self, path: Path) -> str:
        try:
            return self._serve_folder(path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # it did not exist before, so no client has written to it
            raise

    def drop(self, node: str) -> None:
        """End a node and remove its data, without waiting for its calls to end."""
        server, device = self._servers.pop(node)
        self._removals.submit(_remove_node, server, Path(device.path))

    @property
    def _family(self) -> int:
        return socket.AF_INET6 if ":" in self._address else socket.AF_INET

    def _serve_folder(self, path: Path, until: float = 0.0) -> str:
        port = int(path.name)
        while True:
            try:
                with socket.create_server((self._address, port), family=self._family):
                    pass  # this fails if the port is in use; gRPC would share it with another process of this user
                server, device = self._start_node(path, port)
                break
            except (StoreError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        node = f"{self._host}:{server.port}"
        self._servers[node] = server, device
        failpoint("memory_nodes.serve")
        return node

    def _start_node(self, path: Path, port: int) -> tuple[NodeServer, Device]:
        from ckpt.storage.member.device import Device
        from ckpt.storage.node.server import NodeServer

        device = Device(path)
        try:
            return NodeServer(device, self._host, port, self._options), device
        except BaseException:
            device.close()
            raise


def nodes_with_steps(folder: Path) -> list[Path]:
    """Return the folders of nodes in the memory of this host that may have steps. Raises StoreError if they can't be read.

    A node has objects or registers if any rank has used it: small steps are in registers alone.
    """
    from ckpt.storage.local.directory import LocalStore
    from ckpt.storage.member.device import OBJECTS, REGISTERS

    try:
        nodes = [path for path in sorted(folder.iterdir()) if path.name.isdigit()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder} can't be read: {error.strerror}; check its permissions") from error
    return [
        path for path in nodes if (path / REGISTERS).exists() or next(iter(LocalStore(path / OBJECTS).list()), None) is not None
    ]


def _remove_node(server: NodeServer, path: Path) -> None:
    server.drain(0.0)
    server.shutdown()
    shutil.rmtree(path, ignore_errors=True)


def _expected_reason(error: Exception) -> str:
    """Return the message of an error in one line. Raises the error itself if no state of the host explains it."""
    if not isinstance(error, CkptError | OSError) and not is_transient(error):  # e.g. no memory: the other nodes continue
        raise error
    return " ".join(str(error).split()) or type(error).__name__


def serve_nodes() -> None:
    """Run the process until its standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    write_stderr_in_background()  # calls of the ranks don't wait for somebody who reads the terminal
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
        kind, _, node = line.strip().partition(" ")
        try:
            if kind == "fresh":
                print("fresh", nodes.create(), flush=True)
            else:
                nodes.drop(node)
        except Exception as error:
            print(f"fails {_expected_reason(error)}", flush=True)
    os._exit(0)  # half-written objects are removed when the folder is served again


if __name__ == "__main__":
    serve_nodes()
