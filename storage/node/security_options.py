"""What a node needs before other hosts may reach it: a token, a certificate with its key, and the authority for clients."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.node.client_credentials import TOKEN_VARIABLE, is_insecure_allowed, is_loopback


@dataclass(frozen=True, slots=True)
class SecurityNames:
    """The names by which messages refer to the files that protect a node: options of a command, or environment variables."""

    token: str
    certificate: str
    key: str
    authority: str


OPTIONS = SecurityNames("--token-file", "--tls-cert", "--tls-key", "--ca-file")
VARIABLES = SecurityNames("CKPT_TOKEN_FILE", "CKPT_TLS_CERT_FILE", "CKPT_TLS_KEY_FILE", "CKPT_CA_FILE")
"""The environment variables with the same meaning, for nodes that a program serves."""


@dataclass(frozen=True, slots=True)
class NodeSecurity:
    """How nodes that other hosts can reach are protected. The token itself is in the environment, as for clients."""

    token: bool = False
    """Whether there is a token."""
    certificate: str = ""
    """The PEM file with the certificate chain."""
    key: str = ""
    """The PEM file with the key of the certificate."""
    authority: str = ""
    """The PEM file of the authority that has signed the certificates of all hosts. With it, clients use TLS."""
    insecure: bool = False
    """Whether nodes may be served without a token and TLS."""

    def missing_options(self, address: str, names: SecurityNames = OPTIONS) -> str:
        """Return the options that are missing for nodes at this address, joined by commas; "" if none is missing."""
        tls = {names.certificate: self.certificate, names.key: self.key, names.authority: self.authority}
        missing = [name for name, file in tls.items() if not file]
        if self.insecure or is_loopback(address):  # TLS is optional, but needs all three options
            return ", ".join(missing) if len(missing) < len(tls) else ""
        return ", ".join(missing if self.token else [names.token, *missing])


def security_from_environment() -> NodeSecurity:
    """Return how the environment protects the nodes that a program serves."""
    has_token = bool(os.environ.get(TOKEN_VARIABLE) or os.environ.get(VARIABLES.token))
    certificate, key, authority = (os.environ.get(n, "") for n in (VARIABLES.certificate, VARIABLES.key, VARIABLES.authority))
    return NodeSecurity(has_token, certificate, key, authority, is_insecure_allowed())


def read_certificate(chain: Path, key: Path, names: SecurityNames = OPTIONS) -> tuple[bytes, bytes]:
    """Return the content of both files; raise InvalidArgument if they can't be used.

    They are checked here, because gRPC would report only that the server did not start.
    """
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
    except OSError as error:
        what = f"{names.certificate} {chain} with {names.key} {key}: {error.strerror or error}"
        message = f"{what}; give a chain and its key, PEM, not encrypted"
        raise InvalidArgument(message) from error
    return chain.read_bytes(), key.read_bytes()


def read_authority(file: Path, name: str = "--tls-ca") -> bytes:
    """Return the certificates of an authority in a file; raise InvalidArgument if they can't be used.

    name: the option or variable that names the file, for the message.
    """
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except OSError as error:
        message = f"{name} {file}: {error.strerror or error}; give the certificates of an authority, PEM"
        raise InvalidArgument(message) from error
    return file.read_bytes()
