"""A node's health and metrics over HTTP, on a port of their own: /healthz, and /metrics for Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ckpt.storage.server import NodeServer


class Monitor:
    """Answers until `close`."""

    def __init__(self, server: NodeServer, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        registry = CollectorRegistry()
        registry.register(_Collector(server))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path == "/healthz":
                    state = "draining" if server.draining else "serving"
                    self._answer(503 if server.draining else 200, "text/plain", f"{state}\n".encode())
                else:
                    self._answer(404, "text/plain", b"there are /healthz and /metrics\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Scrapes are no events."""

        self._http = ThreadingHTTPServer((host, port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, name="ckpt-node-monitor", daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Collector:
    def __init__(self, server: NodeServer) -> None:
        self._server = server

    def describe(self) -> Iterator[Any]:
        return iter(())

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        server = self._server
        used, free = server.usage()
        yield GaugeMetricFamily("ckpt_node_used_bytes", "Bytes that the objects of this node take.", used)
        yield GaugeMetricFamily("ckpt_node_free_bytes", "Bytes that are free for more.", free)
        yield GaugeMetricFamily("ckpt_node_uploads", "Objects that clients are writing now.", len(server.uploads))
        yield GaugeMetricFamily("ckpt_node_draining", "1 once the node takes nothing new.", int(server.draining))
        help_of = {
            "calls": "Calls that were answered.",
            "errors": "Calls that were refused or failed.",
            "seconds": "Seconds spent in calls.",
            "bytes_received": "Bytes of objects received.",
            "bytes_sent": "Bytes of objects sent.",
        }
        known = dict(server.counters)
        for what, text in help_of.items():
            family = CounterMetricFamily(f"ckpt_node_{what}", text, labels=["verb"])
            for (kind, verb), value in sorted(known.items()):
                if kind == what:
                    family.add_metric([verb], value)
            yield family
