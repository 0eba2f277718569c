"""The class MetricsServer, the health and the Prometheus metrics of a node over HTTP: /healthz and /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt.storage.base.http_pages import HttpPage, HttpPages
from ckpt.storage.node.server import NodeServer

if TYPE_CHECKING:
    from prometheus_client import Metric


class MetricsServer:
    """Serves both pages on a port of their own until `close`. `port` is the one on which it listens.

    It needs the package prometheus_client. /healthz answers 503 while the node drains.
    """

    def __init__(self, server: NodeServer, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        registry = CollectorRegistry()
        registry.register(_NodeMetricsCollector(server))

        def metrics() -> HttpPage:
            return HttpPage(generate_latest(registry), CONTENT_TYPE_LATEST)

        def health() -> HttpPage:
            return HttpPage(b"draining\n", status=503) if server.is_draining else HttpPage(b"serving\n")

        self._web = HttpPages(host, port, {"/metrics": metrics, "/healthz": health}, "ckpt-node-monitor")
        self.port = self._web.port

    def close(self) -> None:
        self._web.close()


class _NodeMetricsCollector:
    def __init__(self, server: NodeServer) -> None:
        self._server = server

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        server = self._server
        used, free = server.usage()
        yield GaugeMetricFamily("ckpt_node_used_bytes", "Bytes of the objects of this node.", used)
        yield GaugeMetricFamily("ckpt_node_free_bytes", "Bytes that are free for more objects.", free)
        yield GaugeMetricFamily("ckpt_node_uploads", "Objects that clients are writing now.", len(server.uploads))
        yield GaugeMetricFamily("ckpt_node_draining", "1 if the node accepts no new objects.", int(server.is_draining))
        help_of = {
            "calls": "Calls that were answered.",
            "errors": "Calls that were refused or failed.",
            "seconds": "Seconds spent in calls.",
            "bytes_received": "Bytes of objects received.",
            "bytes_sent": "Bytes of objects sent.",
            "bytes_near": "Bytes of objects that clients on this host wrote through descriptors.",
        }
        counters = dict(server.counters)
        for what, text in help_of.items():
            family = CounterMetricFamily(f"ckpt_node_{what}", text, labels=["verb"])
            for (kind, verb), value in sorted(counters.items()):
                if kind == what:
                    family.add_metric([verb], value)
            yield family
