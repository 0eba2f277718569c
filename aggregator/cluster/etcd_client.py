"""A client of etcd: a few calls, through the JSON gateway of its client port (3.4 and later), by http or https."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from ckpt.aggregator.cluster.etcd_access import ETCD_VARIABLES, EtcdCredentials, etcd_credentials_from_environment
from ckpt.storage.base.errors import InvalidArgument, NotFound, Refused, StoreError, Unavailable
from ckpt.storage.node.credentials import is_loopback

_MAX_ANSWER_BYTES = 16 << 20
_NOT_FOUND, _DENIED, _UNAUTHENTICATED = 5, {7, 16}, 16
"""Codes of gRPC."""
_OLD_TOKEN_MESSAGE = "revision of auth store is old"


@dataclass(frozen=True, slots=True)
class EtcdItem:
    """A key of etcd."""

    key: str
    value: bytes
    revision: int
    """When it was changed last; 0 never."""


class _BadToken(Refused):
    """etcd does not know the token of this client any more: they expire, and a restart of etcd forgets them."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """etcd never redirects, and a redirect would take the token along to wherever it points."""

    def redirect_request(self, *_: Any) -> None:
        return None


class EtcdClient:
    """A few calls to etcd. Holds no connection; safe to use from many threads.

    access: that of the environment, where none is given. All calls raise Unavailable when no endpoint answers within the
    deadline, Refused when etcd wants to know who asks or does not allow it.
    """

    def __init__(
        self, endpoints: Sequence[str], deadline_seconds: float = 5.0, credentials: EtcdCredentials | None = None
    ) -> None:
        self._credentials = credentials = etcd_credentials_from_environment() if credentials is None else credentials
        self._endpoints = tuple(map(credentials.endpoint_url, endpoints))
        self._deadline_seconds = deadline_seconds
        self._last_answering = 0
        self._token = ""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]  # a neighbour: no proxy
        if any(endpoint.startswith("https://") for endpoint in self._endpoints):
            handlers.append(urllib.request.HTTPSHandler(context=credentials.tls_context()))
        elif credentials.cert_file or credentials.key_file:
            raise InvalidArgument(
                f"etcd: {ETCD_VARIABLES['cert_file']} is of use by https only; give {ETCD_VARIABLES['ca_file']}, too"
            )
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def host_ports(self) -> list[tuple[str, int]]:
        """Host and port of all endpoints."""
        parts = map(urlsplit, self._endpoints)
        return [(part.hostname or "", part.port or (443 if part.scheme == "https" else 80)) for part in parts]

    @property
    def is_loopback(self) -> bool:
        """Whether all endpoints are on this host."""
        return all(is_loopback(host) for host, _ in self.host_ports)

    def range(self, prefix: str, first: str = "") -> list[EtcdItem]:
        """The keys that begin with a prefix, from `first` on, all as of one moment."""
        after = prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
        answer = self._call("kv/range", {"key": _to_base64(first or prefix), "range_end": _to_base64(after)})
        return [_parse_item(found) for found in answer.get("kvs", ())]

    def get(self, key: str) -> EtcdItem:
        """One key."""
        found = self._call("kv/range", {"key": _to_base64(key)}).get("kvs", ())
        return _parse_item(found[0]) if found else EtcdItem(key, b"", 0)

    def put(self, key: str, value: bytes) -> None:
        """Write a key, whatever is there."""
        self._call("kv/put", {"key": _to_base64(key), "value": _to_base64(value)})

    def put_new(self, values: Mapping[str, bytes]) -> bool:
        """Write keys that are not there yet, all of them or, where one is there, none."""
        absent = [{"key": _to_base64(key), "target": "VERSION", "result": "EQUAL", "version": "0"} for key in values]
        puts = [{"request_put": {"key": _to_base64(key), "value": _to_base64(value)}} for key, value in values.items()]
        return bool(self._call("kv/txn", {"compare": absent, "success": puts}).get("succeeded"))

    def put_leased(self, expected: EtcdItem, value: bytes, lease: int, lasting_key: str) -> bool:
        """Put a value under a key with a lease, and under a lasting key; both, or neither if the first was changed since."""
        unchanged = {
            "key": _to_base64(expected.key),
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": str(expected.revision),
        }
        leased = {"key": _to_base64(expected.key), "value": _to_base64(value), "lease": str(lease)}
        puts = [{"request_put": put} for put in (leased, {"key": _to_base64(lasting_key), "value": _to_base64(value)})]
        answer = self._call("kv/txn", {"compare": [unchanged], "success": puts})
        return bool(answer.get("succeeded"))

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._call("kv/deleterange", {"key": _to_base64(key)})

    def grant_lease(self, lease_seconds: float) -> int:
        """A new lease. etcd makes it longer where it is shorter than its own elections."""
        return _parse_int(self._call("lease/grant", {"TTL": str(max(1, round(lease_seconds)))}), "ID")

    def keep_lease_alive(self, lease: int) -> bool:
        """Begin the time of a lease anew; False where there is no such lease any more."""
        answer = self._call("lease/keepalive", {"ID": str(lease)})
        if not isinstance(result := answer.get("result"), dict):  # a stream: errors come with HTTP 200 too
            raise Unavailable(f"etcd keeps no lease alive now: {answer.get('error')}")
        return "TTL" in result

    def revoke_lease(self, lease: int) -> None:
        """End a lease, and the keys under it."""
        try:
            self._call("lease/revoke", {"ID": str(lease)})
        except NotFound:
            pass  # it has run out

    def _call(self, method: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the endpoints in turn, the one that answered last first; each has its share of the time that is left."""
        until = time.monotonic() + self._deadline_seconds
        first, count = self._last_answering, len(self._endpoints)
        failed = []
        for attempt in range(count):
            index = (first + attempt) % count
            remaining_seconds = max(0.1, until - time.monotonic())
            try:
                answer = self._ask_as_user(
                    self._endpoints[index], method, json.dumps(message).encode(), remaining_seconds / (count - attempt)
                )
            except Unavailable as error:
                failed.append(str(error))
                continue
            self._last_answering = index
            return answer
        raise Unavailable(f"etcd does not answer ({'; '.join(failed)}); start it, or name the endpoints where it is")

    def _ask_as_user(self, endpoint: str, method: str, body: bytes, seconds: float) -> dict[str, Any]:
        if not self._credentials.user:
            return self._ask(endpoint, method, body, seconds)
        token = self._token or self._authenticate(endpoint, seconds)
        try:
            return self._ask(endpoint, method, body, seconds, token)
        except _BadToken:
            return self._ask(endpoint, method, body, seconds, self._authenticate(endpoint, seconds))

    def _authenticate(self, endpoint: str, seconds: float) -> str:
        login = {"name": self._credentials.user, "password": self._credentials.read_password()}
        answer = self._ask(endpoint, "auth/authenticate", json.dumps(login).encode(), seconds)
        token = answer.get("token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise StoreError(f"{endpoint}: etcd gives no token to {self._credentials.user}")
        self._token = token
        return token

    def _ask(self, endpoint: str, method: str, body: bytes, seconds: float, token: str = "") -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        request = urllib.request.Request(f"{endpoint}/v3/{method}", body, headers)
        try:
            with self._opener.open(request, timeout=seconds) as answered:
                text = answered.read(_MAX_ANSWER_BYTES + 1)
        except HTTPError as error:
            raise _http_error(endpoint, error) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            why = (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__
            raise Unavailable(f"{endpoint}: {why}{_tls_advice(endpoint, reason)}") from error
        message = _parse_answer(endpoint, text)
        if isinstance(refused := message.get("error"), dict) and refused.get("grpc_code") == _UNAUTHENTICATED:  # of a stream
            raise _BadToken(f"{endpoint}: {refused.get('message')}")
        return message


def _tls_advice(endpoint: str, reason: object) -> str:
    """What to do about an error of TLS."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f" ({reason.verify_message}); give the authority of its certificate in {ETCD_VARIABLES['ca_file']}"
    if isinstance(reason, ssl.SSLError):
        names = f"{ETCD_VARIABLES['cert_file']} and {ETCD_VARIABLES['key_file']}"
        return f"; where it asks for a certificate of its clients, give {names}"
    if isinstance(reason, ConnectionResetError) and endpoint.startswith("http://"):
        return f"; where it is spoken to by https, give {ETCD_VARIABLES['ca_file']}"
    return ""


def _http_error(endpoint: str, error: HTTPError) -> StoreError:
    """What an HTTP status says. etcd explains it in JSON; other servers do not."""
    # Late, overloaded, without a leader: another may do. Without a majority some calls end as an "unknown" error, 500.
    kind = Unavailable if error.code >= 500 or error.code == 429 else StoreError
    try:
        answer = json.loads(error.read(4096))
        answer = answer["error"] if isinstance(answer["error"], dict) else answer  # as streams say it
        code, message = int(answer["code"] if "code" in answer else answer["grpc_code"]), str(answer["message"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, HTTPException):
        return kind(f"{endpoint}: HTTP {error.code}, which is no answer of etcd; name the port that it serves clients on")
    if code == _UNAUTHENTICATED or _OLD_TOKEN_MESSAGE in message:
        return _BadToken(f"{endpoint}: {message}")
    if "user name is empty" in message:
        return Refused(f"{endpoint}: {message}; give {ETCD_VARIABLES['user']} and {ETCD_VARIABLES['password_file']}")
    if code in _DENIED or "authentication failed" in message:
        return Refused(f"{endpoint}: {message}")
    if code == _NOT_FOUND:
        return NotFound(f"{endpoint}: {message}")
    return kind(f"{endpoint}: {message}")


def _parse_answer(endpoint: str, text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise StoreError(f"{endpoint}: {len(text)} bytes that are no answer of etcd; name the port that it serves clients on")
    return message


def _to_base64(value: str | bytes) -> str:
    """Bytes as the gateway wants them."""
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def _parse_item(found: Mapping[str, Any]) -> EtcdItem:
    try:
        key = b64decode(found["key"]).decode()
        return EtcdItem(key, b64decode(found.get("value", "")), int(found["mod_revision"]))
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"etcd answers what can't be read: {error!r}") from error


def _parse_int(found: Mapping[str, Any], key: str) -> int:
    try:
        return int(found[key])
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"etcd answers without {key}: {error!r}") from error
