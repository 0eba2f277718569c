"""The options of ckpt-node: what is served and where, who may reach it, where it is announced, what it repairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt.tools import common
from ckpt.tools.command_options import CommandFunction, gather_options

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FILE_TYPE = click.Path(exists=True, dir_okay=False, path_type=Path)

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--data", type=click.Path(file_okay=False, path_type=Path), help="The folder that is served; one disk, one node."
    ),
    click.option("--listen", default="127.0.0.1:7070", show_default=True, metavar="HOST:PORT", help="Port 0 takes a free one."),
    click.option(
        "--monitor", metavar="HOST:PORT", help="Health and metrics over HTTP; default: the same host, the port + 1000."
    ),
    click.option("--domain", default="", metavar="KEY=VALUE,…", help="Failure domains, the widest first: rack=r1,host=h3."),
    click.option("--capacity", type=common.Size(), help="Take no more than this, such as 2TB. Default: what the disk has."),
    click.option("--token-file", type=_FILE_TYPE, help="What clients must know."),
    click.option("--tls-cert", type=_FILE_TYPE, help="Certificate chain, PEM."),
    click.option("--tls-key", type=_FILE_TYPE, help="Its key, PEM."),
    click.option("--tls-ca", type=_FILE_TYPE, help="Ask clients for one of this CA."),
    click.option("--insecure", is_flag=True, help="Listen beyond this host without token or TLS."),
    click.option("--read-only", is_flag=True, help="Take no writes."),
    click.option("--no-near", is_flag=True, help="Let clients on this host, too, send every byte over the wire."),
    click.option("--etcd", metavar="URL,…", help="Announce this node in etcd while it serves: http://host:2379,http://…"),
    click.option("--cluster", metavar="NAME", help="The cluster to announce it in. Goes with --etcd."),
    click.option(
        "--advertise", metavar="HOST:PORT", help="Where clients reach it; its name. Default: --listen. Goes with --etcd."
    ),
    click.option("--repair", "repairing", metavar="URL", help="Look after this namespace, when no other node does."),
    click.option(
        "--repair-every",
        default=600.0,
        show_default=True,
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="How often it is looked through.",
    ),
    click.option(
        "--repair-rate", type=common.Size(), metavar="SIZE", help="Repairs write no more than this a second, such as 200MB."
    ),
    click.option("--drain-seconds", default=30.0, show_default=True, type=click.FloatRange(0), help="SIGTERM waits so long."),
)
"""In the order of --help."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What is served, and where. Fields are named as the options, whose help says what they mean."""

    data: Path | None
    listen: str
    monitor: str | None
    domain: str
    capacity: int | None
    read_only: bool
    no_near: bool
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may reach the node."""

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
    """Which namespace the node looks after."""

    repairing: str | None
    repair_every: float
    repair_rate: int | None


def node_options(function: CommandFunction) -> CommandFunction:
    """Give a command the options of ckpt-node: they reach it as `service`, `access`, `announcement` and `repair`."""
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
