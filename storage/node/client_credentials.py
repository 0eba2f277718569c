"""The credentials of a client of nodes, and the file of tokens that a node accepts."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.storage.base.errors import InvalidArgument

log = logging.getLogger("ckpt.node")

TOKEN_VARIABLE = "CKPT_TOKEN"
"""The environment variable with the token itself, in place of a file."""

INSECURE_VARIABLE = "CKPT_INSECURE"
"""The environment variable that allows access from other hosts without TLS."""

ADDRESS_PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.\-]+):(\d{1,5})")
"""HOST:PORT of a server. The host may be an IPv6 address in brackets."""

_MIN_TOKEN_CHARACTERS = 16


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


class TokenFile:
    """The tokens in a file, one on each line. A call returns the present ones, so a change of the file needs no restart.

    With two lines, the node accepts both the old and the new token. If the file can't be used later, the last tokens stay
    valid, and a warning is logged.

    Raises InvalidArgument if the file can't be used at first.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._last_stamp = self._read_stamp()
        self._tokens = self._read_tokens()

    def __call__(self) -> tuple[str, ...]:
        with self._lock:
            stamp = self._read_stamp()
            if stamp != self._last_stamp:
                self._last_stamp = stamp
                try:
                    self._tokens = self._read_tokens()
                    log.info("%s has changed: its new tokens are valid from now on", self._file)
                except InvalidArgument as error:
                    log.warning("%s; the previous tokens stay valid", error)
            return self._tokens

    def _read_stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._file)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _read_tokens(self) -> tuple[str, ...]:
        try:
            tokens = tuple(filter(None, map(str.strip, self._file.read_text().splitlines())))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the token file {self._file} can't be read: {error}") from error
        if min(map(len, tokens), default=0) < _MIN_TOKEN_CHARACTERS:
            raise InvalidArgument(
                f"a token in {self._file} has {min(map(len, tokens), default=0)} characters; use {_MIN_TOKEN_CHARACTERS} or "
                "more, such as of `openssl rand -hex 16`"
            )
        return tokens
