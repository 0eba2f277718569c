"""What the text of options of ckpt-node means: addresses, failure domains, tokens and certificates."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.node.credentials import TokenFile

_MONITOR_OFFSET = 1000
"""From a node's port to that of its metrics: nodes on consecutive ports don't collide."""


def monitor_port(port: int) -> int:
    """The default port of health and metrics; 0, any free one, where the node takes any."""
    if not port:
        return 0
    return port + _MONITOR_OFFSET if port + _MONITOR_OFFSET < 1 << 16 else port - _MONITOR_OFFSET


def open_token_file(file: Path | None) -> TokenFile | None:
    try:
        return None if file is None else TokenFile(file)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def read_certificate(chain: Path, key: Path) -> tuple[bytes, bytes]:
    """What is in the files, once that is known to be of use: gRPC says only that the server did not start."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
    except OSError as error:
        what = f"--tls-cert {chain} with --tls-key {key}: {error.strerror or error}"
        message = f"{what}; give a chain and its key, PEM, not encrypted"
        raise InvalidArgument(message) from error
    return chain.read_bytes(), key.read_bytes()


def read_authority(file: Path) -> bytes:
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except OSError as error:
        message = f"--tls-ca {file}: {error.strerror or error}; give the certificates of an authority, PEM"
        raise InvalidArgument(message) from error
    return file.read_bytes()


def parse_address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"{option} {text}: write HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070")
    return host, int(port)


def parse_labels(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        if not separator or not key or not value:
            raise click.UsageError(f"--domain {text}: write KEY=VALUE pairs, the widest domain first: rack=r1,host=h3")
        found.append((key, value))
    return tuple(found)
