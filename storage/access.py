"""What a client needs to be let in by a node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach nodes."""

    token: str | None = None
    ca: bytes | None = None
    """Authority of the nodes' certificates, PEM. With it the wire is TLS."""
    certificate: tuple[bytes, bytes] | None = None
    """This client's own chain and key, PEM, where nodes ask for one."""
    deadline_seconds: float = 30.0


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it: what listens elsewhere wants token and TLS."""
    return host.startswith("127.") or host.strip("[]") in ("localhost", "::1")
