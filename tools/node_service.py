"""Runs one node: it serves until SIGTERM or SIGINT, waits for running calls, and ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.storage.base.background_stderr import finish_stderr, write_stderr_in_background
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.node.client_credentials import is_loopback
from ckpt.tools.common import format_size, import_optional

if TYPE_CHECKING:
    from ckpt.aggregator.cluster.etcd import Announcement
    from ckpt.aggregator.maintenance.repair_leader import RepairLeader
    from ckpt.storage.member.device import Device
    from ckpt.storage.node.metrics import MetricsServer
    from ckpt.storage.node.server import NodeOptions, NodeServer
    from ckpt.tools.node_announcement import AnnouncementSpec

log = logging.getLogger("ckpt.node")

_END_SECONDS = 3.0
"""How long the end of the server may take after the time for running calls."""


@dataclass(frozen=True, slots=True)
class RepairSpec:
    """The namespace that a node scrubs and repairs, if no other node does."""

    url: str
    every_seconds: float
    bytes_per_second: int | None

    def start(self, identity: str) -> RepairLeader:
        """Start the repairs in a thread. identity: that of the device of this node."""
        from ckpt.aggregator.file_io.namespace import open_namespace
        from ckpt.aggregator.maintenance.repair_leader import RepairLeader

        return RepairLeader(lambda: open_namespace(self.url)[0], identity, self.every_seconds, self.bytes_per_second)


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What a node serves, where, and which other tasks it has."""

    data: Path
    capacity: int | None
    """In bytes; None for the size of the disk."""
    listen: tuple[str, int]
    monitor: tuple[str, int]
    """Where health and metrics are served."""
    options: NodeOptions
    announcement: AnnouncementSpec | None
    repair: RepairSpec | None
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class _RunningNode:
    """The parts that a node has started, and must end."""

    device: Device
    server: NodeServer
    metrics_server: MetricsServer | None
    announced: Announcement | None
    repair_leader: RepairLeader | None


class _EndSignals:
    """Waits for SIGTERM or SIGINT from the main thread."""

    _NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._receiver, self._wake = socket.socketpair()  # a signal just before Event.wait would not end that wait
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for each in self._NUMBERS:
            signal.signal(each, lambda *_: None)

    def wait(self) -> None:
        """Wait for the signal."""
        while self._receiver.recv(1)[0] not in self._NUMBERS:
            pass
        signal.set_wakeup_fd(-1)


def serve_node(spec: ServiceSpec) -> int:
    """Serve until SIGTERM or SIGINT, wait for running calls, and return the exit status."""
    from ckpt.storage.member.device import Device
    from ckpt.storage.node.server import NodeServer

    import_optional("prometheus_client", "ckpt-node", "node")
    _log_to_stderr()
    host, port = spec.listen
    device = Device(spec.data, spec.capacity)
    _require_free_port(host, port)
    server = NodeServer(device, host, port, spec.options)
    metrics_server = _start_metrics(server, *spec.monitor)
    end_signals = _EndSignals()
    if spec.options.certificate is None and not is_loopback(host):
        log.warning("--insecure: anyone who reaches %s:%d can read and write everything", host, server.port)
    announced = (
        spec.announcement.announce(f"{host}:{server.port}", spec.options.labels, server.identity) if spec.announcement else None
    )
    metrics = f"metrics at {spec.monitor[0]}:{metrics_server.port}" if metrics_server else "no metrics"
    used, free = server.usage()
    log.info(
        "serving %s at %s:%d (%s), %s used, %s free, device %s",
        device.path, host, server.port, metrics, format_size(used), format_size(free), server.identity[:8],
    )  # fmt: skip
    repair_leader = spec.repair.start(server.identity) if spec.repair else None
    end_signals.wait()  # the server has run since it was created; `serve` would only wait, and handle the signals
    _end_node(_RunningNode(device, server, metrics_server, announced, repair_leader), spec.drain_seconds)
    return 0


class _OneLineFormatter(logging.Formatter):
    """Formats each event in one line, including tracebacks and texts of clients."""

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(line.strip() for line in super().format(record).splitlines() if line.strip(" ^~"))


def _log_to_stderr() -> None:
    write_stderr_in_background()  # calls don't wait for somebody who reads the log
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _require_free_port(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), port), family=family):
            pass  # the error of gRPC has less information in more lines
    except OSError as error:
        message = f"can't listen on {host}:{port}: {error.strerror or error}; choose another --listen"
        raise InvalidArgument(message) from error


def _start_metrics(server: NodeServer, host: str, port: int) -> MetricsServer | None:
    from ckpt.storage.node.metrics import MetricsServer

    try:
        return MetricsServer(server, host.strip("[]"), port)
    except OSError as error:  # a node can serve without metrics
        log.warning("no health and metrics: can't listen on %s:%d: %s; choose another --monitor", host, port, error.strerror)
        return None


def _end_node(node: _RunningNode, drain_seconds: float) -> None:
    """End the node. If calls don't end in time, end the process."""
    until = time.monotonic() + drain_seconds
    log.info("draining: %d uploads under way", len(node.server.uploads))
    ending = threading.Thread(target=_end_service, args=(node, until), name="ckpt-node-end", daemon=True)
    ending.start()
    ending.join(max(0.0, until - time.monotonic()) + _END_SECONDS)
    stuck = ending.is_alive()
    if stuck:
        log.warning("calls under way did not end within %g s and were cut off; use a larger --drain-seconds", drain_seconds)
    else:
        if node.metrics_server is not None:
            node.metrics_server.close()
        node.device.close()
    log.info("ended")
    if stuck:  # Flight can't abort a call, and would also wait for it when the process ends
        finish_stderr()
        os._exit(0)


def _end_service(node: _RunningNode, until: float) -> None:
    """Refuse new calls, wait for running ones until a time of time.monotonic(), and shut the server down."""
    node.server.is_draining = True
    if node.announced is not None:
        node.announced.close()
    aborted = node.server.drain(max(0.0, until - time.monotonic()))
    if aborted:
        log.warning("%d uploads did not end in time and were discarded; use a larger --drain-seconds", aborted)
    if node.repair_leader is not None:
        node.repair_leader.close(max(0.0, until - time.monotonic()))
    node.server.shutdown()
