"""The credentials for etcd: its certificate authority, the client's certificate, user and password.

These environment variables apply to everything that uses etcd (members of a namespace, announcements of nodes, the run log):

    CKPT_ETCD_CA_FILE          PEM: use https, and check the certificate of etcd by this authority
    CKPT_ETCD_CERT_FILE        PEM: the client's certificate, for an etcd with --client-cert-auth
    CKPT_ETCD_KEY_FILE         PEM: the key of the client's certificate
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
from ckpt.storage.base.fd_io import describe_unreadable_file
from ckpt.storage.node.client_credentials import is_insecure_allowed, is_loopback

ETCD_VARIABLES = {
    "ca_file": "CKPT_ETCD_CA_FILE", "cert_file": "CKPT_ETCD_CERT_FILE", "key_file": "CKPT_ETCD_KEY_FILE",
    "user": "CKPT_ETCD_USER", "password_file": "CKPT_ETCD_PASSWORD_FILE",
}  # fmt: skip
"""The environment variable of each field of EtcdCredentials."""
_PASSWORD_VARIABLE = "CKPT_ETCD_PASSWORD"


@dataclass(frozen=True, slots=True)
class EtcdCredentials:
    """The credentials of a client of etcd. Files are PEM; an empty field is not used."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password_file: str = ""
    password: str = field(default="", repr=False)
    """Used where there is no password file."""
    insecure: bool = False
    """Whether the user allows the password to be sent to other hosts without TLS."""

    def endpoint_url(self, text: str) -> str:
        """Return the URL of an endpoint, given as host:port or as a URL. The default scheme is https with `ca_file`, else http.

        Raises InvalidArgument if the URL is http although `ca_file` is set, or would carry a password in clear text.
        """
        url = text if "://" in text else f"{'https' if self.ca_file else 'http'}://{text}"
        if url.startswith("https://"):
            return url
        if self.ca_file:
            raise InvalidArgument(f"{url}: a certificate authority for etcd is given: write https:// or only HOST:PORT")
        if self.user and not self.insecure and not is_loopback(urlsplit(url).hostname or ""):
            raise InvalidArgument(
                f"the password of {self.user} would be sent to {url} without encryption: give {ETCD_VARIABLES['ca_file']}, "
                "or allow it with CKPT_INSECURE=1"
            )
        return url

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context for https. It checks every certificate, by `ca_file` or by the authorities of the system.

        Raises InvalidArgument if the files can't be used.
        """
        if bool(self.cert_file) != bool(self.key_file):
            raise InvalidArgument(
                f"etcd: {ETCD_VARIABLES['cert_file']} and {ETCD_VARIABLES['key_file']} go together: set both, or neither"
            )
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # SSLError is a subclass
            given = {"ca_file": self.ca_file, "cert_file": self.cert_file, "key_file": self.key_file}
            files = ", ".join(f"{ETCD_VARIABLES[name]} {file}" for name, file in given.items() if file)
            raise InvalidArgument(f"etcd: {files} can't be used: {error.strerror or error}; give files in PEM") from error
        return context

    def read_password(self) -> str:
        """Return the password; its file is read at each call. Raises InvalidArgument if the file has none."""
        if not self.password_file:
            return self.password
        try:
            password = Path(os.path.expanduser(self.password_file)).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"{ETCD_VARIABLES['password_file']} {self.password_file} can't be read: {describe_unreadable_file(error)}"
            ) from error
        if not password:
            raise InvalidArgument(
                f"{ETCD_VARIABLES['password_file']} {self.password_file} is empty; write the password into it"
            )
        return password


def etcd_credentials_from_environment(overrides: Mapping[str, str] | None = None) -> EtcdCredentials:
    """Return the credentials that the environment gives, with `overrides` in their place, by field name."""
    settings = {name: os.environ.get(variable, "") for name, variable in ETCD_VARIABLES.items()}
    password = os.environ.get(_PASSWORD_VARIABLE, "")
    credentials = EtcdCredentials(**settings, password=password, insecure=is_insecure_allowed())
    return replace(credentials, **(overrides or {}))  # type: ignore[arg-type]
