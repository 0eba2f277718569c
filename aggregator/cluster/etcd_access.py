"""How etcd is reached: its certificate authority, this client's own certificate, user and password.

The environment says it for all that speaks to etcd (members of a namespace, announcements of nodes, the log of a run):

    CKPT_ETCD_CA_FILE          PEM: with it etcd is spoken to by https, and its certificate is checked
    CKPT_ETCD_CERT_FILE        PEM: this client's certificate, for an etcd with --client-cert-auth
    CKPT_ETCD_KEY_FILE         PEM: its key
    CKPT_ETCD_USER             for an etcd with authentication enabled
    CKPT_ETCD_PASSWORD_FILE    or CKPT_ETCD_PASSWORD
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.node.credentials import is_insecure_allowed, is_loopback

ETCD_VARIABLES = {
    "ca_file": "CKPT_ETCD_CA_FILE", "cert_file": "CKPT_ETCD_CERT_FILE", "key_file": "CKPT_ETCD_KEY_FILE",
    "user": "CKPT_ETCD_USER", "password_file": "CKPT_ETCD_PASSWORD_FILE",
}  # fmt: skip
"""By the field of EtcdAccess."""
_PASSWORD_VARIABLE = "CKPT_ETCD_PASSWORD"


@dataclass(frozen=True, slots=True)
class EtcdCredentials:
    """Files are PEM; "" where there is none."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password_file: str = ""
    password: str = field(default="", repr=False)
    """Where there is no password file."""
    insecure: bool = False
    """The user has allowed the password to be sent without TLS to other hosts."""

    def endpoint_url(self, text: str) -> str:
        """The URL of host:port or of a URL: https where the authority is known. Raises InvalidArgument where etcd must not be
        spoken to in that way."""
        url = text if "://" in text else f"{'https' if self.ca_file else 'http'}://{text}"
        if url.startswith("https://"):
            return url
        if self.ca_file:
            raise InvalidArgument(f"{url}: there is a certificate authority for etcd, so write https:// or only HOST:PORT")
        if self.user and not self.insecure and not is_loopback(urlsplit(url).hostname or ""):
            raise InvalidArgument(
                f"the password of {self.user} would be sent to {url} without encryption: give {ETCD_VARIABLES['ca_file']}, "
                "or allow "
                "it with CKPT_INSECURE=1"
            )
        return url

    def tls_context(self) -> ssl.SSLContext:
        """What https is spoken by: every certificate is checked, by the authority or by those of the system."""
        if bool(self.cert_file) != bool(self.key_file):
            raise InvalidArgument(f"etcd: {ETCD_VARIABLES['cert_file']} and {ETCD_VARIABLES['key_file']} go together")
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # SSLError is one
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise InvalidArgument(f"etcd: {files} can't be used: {error.strerror or error}; give files in PEM") from error
        return context

    def read_password(self) -> str:
        """The password, as it is now. Raises InvalidArgument where it can't be read."""
        if not self.password_file:
            return self.password
        try:
            return Path(self.password_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the password of etcd in {self.password_file} can't be read: {error}") from error


def etcd_credentials_from_environment(overrides: Mapping[str, str] | None = None) -> EtcdCredentials:
    """What the environment says, with `more` in place of it, by field."""
    settings = {name: os.environ.get(variable, "") for name, variable in ETCD_VARIABLES.items()}
    access = EtcdCredentials(**settings, password=os.environ.get(_PASSWORD_VARIABLE, ""), insecure=is_insecure_allowed())
    return replace(access, **(overrides or {}))  # type: ignore[arg-type]
