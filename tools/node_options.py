"""The options of ckpt-node: what it serves, who has access, where it is announced, and what it repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt.tools import common
from ckpt.tools.command_options import CommandFunction, gather_options

NODE_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FILE_TYPE = click.Path(exists=True, dir_okay=False, path_type=Path)

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--data", type=click.Path(file_okay=False, path_type=Path), help="The folder to serve: one node for each disk."
    ),
    click.option(
        "--listen", default="127.0.0.1:7070", show_default=True, metavar="HOST:PORT", help="Port 0 chooses a free one."
    ),
    click.option(
        "--monitor", metavar="HOST:PORT", help="Health and metrics over HTTP; default: the same host, the port + 1000."
    ),
    click.option("--domain", default="", metavar="KEY=VALUE,…", help="Failure domains, the widest first: rack=r1,host=h3."),
    click.option("--capacity", type=common.Size(), help="The most bytes to store, such as 2TB. Default: the size of the disk."),
    click.option("--token-file", type=_FILE_TYPE, help="The tokens, of which clients must have one; one on each line."),
    click.option("--tls-cert", type=_FILE_TYPE, help="The certificate chain of this node, PEM."),
    click.option("--tls-key", type=_FILE_TYPE, help="The key of the certificate, PEM."),
    click.option("--tls-ca", type=_FILE_TYPE, help="Require a certificate of this authority from clients, PEM."),
    click.option("--insecure", is_flag=True, help="Allow access from other hosts without token or TLS."),
    click.option("--read-only", is_flag=True, help="Refuse all writes."),
    click.option("--no-fd-passing", is_flag=True, help="Serve clients on this host over the wire, too; pass no descriptors."),
    click.option("--no-near", is_flag=True, hidden=True),  # its former name
    click.option("--etcd", metavar="URL,…", help="Announce this node in etcd while it serves: http://host:2379,http://…"),
    click.option("--cluster", metavar="NAME", help="The cluster in which to announce the node. Needs --etcd."),
    click.option(
        "--advertise",
        metavar="HOST:PORT",
        help="The address for clients, and the name of the node. Default: --listen. Needs --etcd.",
    ),
    click.option("--repair", "repairing", metavar="URL", help="Scrub and repair this namespace, if no other node does."),
    click.option(
        "--repair-every",
        default=600.0,
        show_default=True,
        type=common.Number(0, common.LONGEST_WAIT_SECONDS, min_open=True),
        metavar="SECONDS",
        help="The time between two scrubs of that namespace.",
    ),
    click.option(
        "--repair-rate", type=common.Size(), metavar="SIZE", help="The most bytes that repairs write per second, such as 200MB."
    ),
    click.option(
        "--drain-seconds",
        default=30.0,
        show_default=True,
        type=common.Number(0, common.LONGEST_WAIT_SECONDS),
        help="How long the node waits for running writes after SIGTERM.",
    ),
)
"""In the order of --help."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What is served, and where. The fields have the names of the options, whose help explains them."""

    data: Path | None
    listen: str
    monitor: str | None
    domain: str
    capacity: int | None
    read_only: bool
    no_fd_passing: bool
    no_near: bool
    """The former name of `no_fd_passing`."""
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who has access to the node."""

    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    insecure: bool


@dataclass(frozen=True, slots=True)
class AnnouncementOptions:
    """Where the node is announced."""

    etcd: str | None
    cluster: str | None
    advertise: str | None


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """Which namespace the node scrubs and repairs."""

    repairing: str | None
    repair_every: float
    repair_rate: int | None


def node_options(function: CommandFunction) -> CommandFunction:
    """Add the options of ckpt-node to a command, which gets them as `service`, `access`, `announcement` and `repair`."""
    gathered = {
        "service": ServiceOptions,
        "access": AccessOptions,
        "announcement": AnnouncementOptions,
        "repair": RepairOptions,
    }
    for argument, options_type in gathered.items():
        function = gather_options(argument, options_type)(function)
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
