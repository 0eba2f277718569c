"""Announces a node in etcd, as the options of ckpt-node request it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ckpt.storage.base.errors import InvalidArgument
from ckpt.tools.node_arguments import parse_address
from ckpt.tools.node_options import AnnouncementOptions

if TYPE_CHECKING:
    from ckpt.aggregator.cluster.etcd import Announcement

_ANY_ADDRESSES = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class AnnouncementSpec:
    """In which etcd and cluster to announce a node, and its address."""

    endpoints: tuple[str, ...]
    cluster: str
    advertise: str | None
    """The address for clients; None for the one on which the node listens."""

    def announce(self, listen_address: str, labels: tuple[tuple[str, str], ...], identity: str) -> Announcement:
        """Announce a running node, until the returned object is closed.

        labels: its failure domains. identity: that of its device.
        """
        from ckpt.aggregator.cluster import etcd

        address = self.advertise or listen_address
        node = etcd.AnnouncedNode(address, "/".join(value for _, value in labels), device=identity)
        return etcd.announce(self.endpoints, self.cluster, address, node)


def parse_announcement(options: AnnouncementOptions, host: str) -> AnnouncementSpec | None:
    """Return how to announce a node, or None without --etcd; raise UsageError for wrong options. host: where it listens."""
    endpoints, cluster, advertise = options.etcd, options.cluster, options.advertise
    if endpoints is None:
        if cluster is not None or advertise is not None:
            raise click.UsageError("--cluster and --advertise need --etcd, such as http://host:2379")
        return None

    from ckpt.aggregator.cluster import etcd

    if cluster is None:
        raise click.UsageError("--etcd needs --cluster NAME, the cluster of this node")
    if advertise is None and host in _ANY_ADDRESSES:
        raise click.UsageError(f"no client can reach {host}: give --advertise HOST:PORT, the address of this node")
    if advertise is not None and not parse_address(advertise, "--advertise")[1]:
        raise click.UsageError(f"--advertise {advertise}: add the port, which clients need, too")
    try:
        etcd.check_address(advertise or f"{host}:0")
        return AnnouncementSpec(etcd.parse_endpoints(endpoints), etcd.check_cluster(cluster), advertise)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
