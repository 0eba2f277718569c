"""Parses the values of options of ckpt-node: addresses, failure domains, token files and certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.node.client_credentials import MAX_PORT

if TYPE_CHECKING:
    from ckpt.storage.node.token_check import TokenFile

_MONITOR_OFFSET = 1000
"""The distance from the port of a node to that of its metrics, so that nodes on consecutive ports don't collide."""


def monitor_port(port: int) -> int:
    """Return the default port of health and metrics for the port of a node; 0 for 0, which means any free port."""
    if not port:
        return 0
    return port + _MONITOR_OFFSET if port + _MONITOR_OFFSET <= MAX_PORT else port - _MONITOR_OFFSET


def open_token_file(file: Path | None) -> TokenFile | None:
    """Return the tokens in a file, or None without a file; raise UsageError if it can't be used."""
    from ckpt.storage.node.token_check import TokenFile  # imports pyarrow.flight, which `--help` does not need

    try:
        return None if file is None else TokenFile(file)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port of an address; raise UsageError, which names the option, for another text."""
    host, _, port = text.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare or not (port.isascii() and port.isdigit()):
        raise click.UsageError(f"{option} {text}: write HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070")
    if len(port) > 5 or int(port) > MAX_PORT:
        raise click.UsageError(f"{option} {text}: the port must be 0 to {MAX_PORT}, where 0 chooses a free one")
    return host, int(port)


def parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    """Return the failure domains in KEY=VALUE,…; raise UsageError for another text."""
    found = []
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        if not separator or not key or not value:
            raise click.UsageError(f"--domain {text}: write KEY=VALUE pairs, the widest domain first: rack=r1,host=h3")
        found.append((key, value))
    return tuple(found)
