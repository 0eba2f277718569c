"""Storage nodes for tests: in this process where only their behaviour matters, as processes where they are killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckpt.aggregator.cluster.config import NamespaceConfig, config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.member.device import Device
from ckpt.storage.node.server import NodeOptions, NodeServer
from helpers.processes import stop


class LocalNode:
    """A node in this process."""

    def __init__(self, folder: Path, options: NodeOptions | None = None, capacity: int | None = None) -> None:
        self.folder = folder
        self.device = Device(folder, capacity)
        self.server = NodeServer(self.device, options=options)
        self.address = f"127.0.0.1:{self.server.port}"

    def close(self) -> None:
        self.server.drain(0)
        self.server.shutdown()
        self.device.close()


@contextmanager
def three_nodes(folder: Path) -> Iterator[str]:
    """Start three nodes in this process; yield their addresses, as a URL contains them."""
    nodes = [LocalNode(folder / f"n{i}") for i in range(3)]
    yield ",".join(node.address for node in nodes)
    for node in nodes:
        node.close()


class NodeProcess:
    """A node in a process of its own, as users start it. program: what Python runs."""

    def __init__(
        self, folder: Path, *options: str, port: int = 0, failpoints: str = "", host: str = "127.0.0.1",
        program: Sequence[str] = ("-m", "ckpt.tools.node"),
    ) -> None:  # fmt: skip
        self.folder = folder
        self._host = host
        self._command = [sys.executable, *program, "--data", str(folder), *options]
        self.port = port
        self._failpoints = failpoints
        self.start()

    def start(self) -> None:
        """Start the node, and wait until it serves."""
        command = [*self._command, "--listen", f"{self._host}:{self.port}", "--monitor", f"{self._host}:0"]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"CKPT_FAILPOINTS": self._failpoints}
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving .* at \S+:(\d+) \(metrics at \S+:(\d+)\)", line):
                self.port, self.monitor = int(found[1]), int(found[2])
                break
        else:
            raise RuntimeError(f"the node did not start: {''.join(self.log)}")
        self.address = f"{self._host}:{self.port}"
        self._reading = threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True)
        self._reading.start()

    def ended(self) -> None:
        """Wait until the process has ended and its log is complete."""
        self.process.wait(600)
        self._reading.join(600)

    def signal(self, number: int) -> None:
        """Send a signal; with SIGSTOP, return only once every thread is stopped."""
        if number == signal.SIGSTOP:
            stop(self.process.pid)
        else:
            self.process.send_signal(number)

    def stopped(self) -> bool:
        """Return whether the process is stopped by SIGSTOP."""
        if self.process.poll() is not None:
            return False
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@contextmanager
def node_processes(folder: Path, count: int) -> Iterator[list[NodeProcess]]:
    """Start nodes in processes of their own, and yield them."""
    made = [NodeProcess(folder / f"n{i}") for i in range(count)]
    try:
        yield made
    finally:
        for process in made:
            process.close()


def directories(folder: Path, count: int, **table: Any) -> NamespaceConfig:
    """Return the configuration of a namespace on this number of directories, whose parent is created."""
    folder.mkdir(parents=True, exist_ok=True)
    members = [{"url": str(folder / f"disk{i}"), "name": f"disk{i}"} for i in range(count)]
    return config_from_table("test", {"members": members, **table}, "the test")


def nodes_config(nodes: list[Any], **table: Any) -> NamespaceConfig:
    """Return the configuration of a namespace on nodes, with a short deadline so that dead nodes are detected early."""
    members = [node.address for node in nodes]
    return config_from_table("test", {"members": members, "deadline_seconds": 5.0, **table}, "the test")


def quick(config: NamespaceConfig) -> Namespace:
    """Return a namespace with short timeouts."""
    namespace = Namespace(config)
    namespace.member_io.append_timeout_seconds = 2.0
    namespace.member_io.hedge_after_seconds = 0.2
    return namespace


class Link:
    """A TCP proxy before a node that can refuse, delay, block or change its traffic."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = False
        self.seconds = 0.0
        self.changed_requests: tuple[bytes, bytes] = (b"", b"")
        """Bytes of requests, and the bytes in their place."""
        self.changed_answers: tuple[bytes, bytes] = (b"", b"")
        self._flow = threading.Event()
        self._flow.set()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, blocked: bool) -> None:
        """Block all traffic without closing a connection, like a lost route; or let it flow again."""
        (self._flow.clear if blocked else self._flow.set)()

    def sever(self) -> None:
        """Close every connection, and refuse new ones."""
        self.cut = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            if self.cut:
                accepted.close()
                continue
            try:
                connected = socket.create_connection(self._target)
            except OSError:
                accepted.close()
                continue
            self._sockets += [accepted, connected]
            for a, b in ((accepted, connected), (connected, accepted)):
                threading.Thread(target=self._pump, args=(a, b, a is accepted), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                self._flow.wait()
                if self.seconds:
                    time.sleep(self.seconds)
                old, new = self.changed_requests if is_request else self.changed_answers
                target.sendall(data.replace(old, new) if old else data)
        except OSError:
            pass
        for each in (source, target):
            with suppress(OSError):
                each.close()

    def close(self) -> None:
        self._flow.set()
        self._listener.close()
        self.sever()


def garbage() -> tuple[str, socket.socket]:
    """Start a server that answers random bytes; return its address and its socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError):
                accepted.sendall(os.urandom(5000))
                accepted.close()

    threading.Thread(target=answer, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}", listener
