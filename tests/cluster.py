"""Nodes for tests: in this process where only their behaviour matters, as processes where they are killed and stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ckpt.aggregator.members import Config, from_table
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.device import Device
from ckpt.storage.server import NodeOptions, NodeServer


class Here:
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


class Process:
    """A node as users start it."""

    def __init__(self, folder: Path, *options: str, port: int = 0, failpoints: str = "") -> None:
        self.folder = folder
        self._command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(folder), *options]
        self.port = port
        self._failpoints = failpoints
        self.start()

    def start(self) -> None:
        command = [*self._command, "--listen", f"127.0.0.1:{self.port}", "--monitor", "127.0.0.1:0"]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"CKPT_FAILPOINTS": self._failpoints}
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving .* at 127\.0\.0\.1:(\d+) \(metrics at 127\.0\.0\.1:(\d+)\)", line):
                self.port, self.monitor = int(found[1]), int(found[2])
                break
        else:
            raise RuntimeError(f"the node did not start: {''.join(self.log)}")
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def directories(folder: Path, count: int, **table: Any) -> Config:
    """A namespace of directories."""
    members = [{"url": str(folder / f"disk{i}"), "name": f"disk{i}"} for i in range(count)]
    return from_table("test", {"members": members, **table}, "the test")


def nodes_config(nodes: list[Any], **table: Any) -> Config:
    """A namespace of nodes, which are found quickly to be dead."""
    members = [node.address for node in nodes]
    return from_table("test", {"members": members, "deadline_seconds": 5.0, **table}, "the test")


def quick(config: Config) -> Namespace:
    """A namespace that does not wait long."""
    namespace = Namespace(config)
    namespace.slow_seconds = 2.0
    namespace.hedge_seconds = 0.2
    return namespace
