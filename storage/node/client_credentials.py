"""The credentials with which a client calls nodes: token, certificates, deadline."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field

from ckpt.storage.base.errors import InvalidArgument

TOKEN_VARIABLE = "CKPT_TOKEN"
"""The environment variable with the token itself, in place of a file."""

INSECURE_VARIABLE = "CKPT_INSECURE"
"""The environment variable that allows access from other hosts without TLS."""

ADDRESS_PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.\-]+):(\d{1,5})")
"""HOST:PORT of a server. The host may be an IPv6 address in brackets."""


MAX_PORT = (1 << 16) - 1


def require_valid_port(address: str, source: str) -> None:
    """Raise InvalidArgument if the port of HOST:PORT can't be that of a server. source: has the address."""
    if not 0 < int(address.rpartition(":")[2]) <= MAX_PORT:
        raise InvalidArgument(f"{source}: the port of {address} must be 1 to {MAX_PORT}")


@dataclass(frozen=True, slots=True)
class NodeCredentials:
    """The token, certificates and deadline with which a client calls nodes."""

    token: str | None = field(default=None, repr=False)
    ca: bytes | None = None
    """The certificate authority of the nodes, PEM. With it, connections use TLS."""
    certificate: tuple[bytes, bytes] | None = field(default=None, repr=False)
    """The certificate chain and key of this client, PEM, for nodes that require one."""
    deadline_seconds: float = 30.0
    """The deadline of one call."""
    insecure: bool = False
    """Whether the user allows the token to be sent without TLS to other hosts."""


def is_insecure_allowed() -> bool:
    """Return whether the environment (CKPT_INSECURE) allows secrets to be sent without TLS to other hosts."""
    return os.environ.get(INSECURE_VARIABLE, "") not in ("", "0")


def require_encryption(credentials: NodeCredentials, address: str) -> None:
    """Raise InvalidArgument if the token would be sent unencrypted to another host. address: host:port."""
    if (
        credentials.token
        and credentials.ca is None
        and not credentials.insecure
        and not is_loopback(address.rpartition(":")[0])
    ):
        raise InvalidArgument(
            f"the token would be sent to {address} without encryption: give the certificate authority of the node "
            "(CKPT_CA_FILE, or ca_file in the TOML file), or allow it (CKPT_INSECURE=1, or insecure = true)"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach the address `host`. Other addresses require a token and TLS."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:  # a host name, such as localhost or 127.example.org
        return name == "localhost"
