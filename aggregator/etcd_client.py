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

from ckpt.aggregator.etcd_access import VARIABLES, EtcdAccess, from_environment
from ckpt.storage.access import is_loopback
from ckpt.storage.errors import InvalidArgument, NotFound, Refused, StoreError, Unavailable

_ANSWER_BYTES = 16 << 20
_NOT_FOUND, _DENIED, _UNAUTHENTICATED = 5, {7, 16}, 16
"""Codes of gRPC."""
_OLD_TOKEN = "revision of auth store is old"


@dataclass(frozen=True, slots=True)
class Item:
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


class Etcd:
    """A few calls to etcd. Holds no connection; safe to use from many threads.

    access: that of the environment, where none is given. All calls raise Unavailable when no endpoint answers within the
    deadline, Refused when etcd wants to know who asks or does not allow it.
    """

    def __init__(self, endpoints: Sequence[str], seconds: float = 5.0, access: EtcdAccess | None = None) -> None:
        self._access = access = from_environment() if access is None else access
        self._endpoints = tuple(map(access.endpoint, endpoints))
        self._seconds = seconds
        self._first = 0
        self._token = ""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]  # a neighbour: no proxy
        if any(endpoint.startswith("https://") for endpoint in self._endpoints):
            handlers.append(urllib.request.HTTPSHandler(context=access.context()))
        elif access.cert_file or access.key_file:
            raise InvalidArgument(f"etcd: {VARIABLES['cert_file']} is of use by https only; give {VARIABLES['ca_file']}, too")
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Host and port of all endpoints."""
        parts = map(urlsplit, self._endpoints)
        return [(part.hostname or "", part.port or (443 if part.scheme == "https" else 80)) for part in parts]

    @property
    def is_loopback(self) -> bool:
        """Whether all endpoints are on this host."""
        return all(is_loopback(host) for host, _ in self.places)

    def range(self, prefix: str, first: str = "") -> list[Item]:
        """The keys that begin with a prefix, from `first` on, all as of one moment."""
        after = prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
        answer = self._call("kv/range", {"key": _text(first or prefix), "range_end": _text(after)})
        return [_item(found) for found in answer.get("kvs", ())]

    def get(self, key: str) -> Item:
        """One key."""
        found = self._call("kv/range", {"key": _text(key)}).get("kvs", ())
        return _item(found[0]) if found else Item(key, b"", 0)

    def put(self, key: str, value: bytes) -> None:
        """Write a key, whatever is there."""
        self._call("kv/put", {"key": _text(key), "value": _text(value)})

    def put_new(self, values: Mapping[str, bytes]) -> bool:
        """Write keys that are not there yet, all of them or, where one is there, none."""
        absent = [{"key": _text(key), "target": "VERSION", "result": "EQUAL", "version": "0"} for key in values]
        puts = [{"request_put": {"key": _text(key), "value": _text(value)}} for key, value in values.items()]
        return bool(self._call("kv/txn", {"compare": absent, "success": puts}).get("succeeded"))

    def put_both(self, seen: Item, value: bytes, lease: int, lasting: str) -> bool:
        """Put a value under a key with a lease, and under a lasting key; both, or neither if the first was changed since."""
        unchanged = {"key": _text(seen.key), "target": "MOD", "result": "EQUAL", "mod_revision": str(seen.revision)}
        leased = {"key": _text(seen.key), "value": _text(value), "lease": str(lease)}
        puts = [{"request_put": put} for put in (leased, {"key": _text(lasting), "value": _text(value)})]
        answer = self._call("kv/txn", {"compare": [unchanged], "success": puts})
        return bool(answer.get("succeeded"))

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._call("kv/deleterange", {"key": _text(key)})

    def grant(self, ttl: float) -> int:
        """A new lease. etcd makes it longer where it is shorter than its own elections."""
        return _number(self._call("lease/grant", {"TTL": str(max(1, round(ttl)))}), "ID")

    def keep_alive(self, lease: int) -> bool:
        """Begin the time of a lease anew; False where there is no such lease any more."""
        answer = self._call("lease/keepalive", {"ID": str(lease)})
        if not isinstance(result := answer.get("result"), dict):  # a stream: errors come with HTTP 200 too
            raise Unavailable(f"etcd keeps no lease alive now: {answer.get('error')}")
        return "TTL" in result

    def revoke(self, lease: int) -> None:
        """End a lease, and the keys under it."""
        try:
            self._call("lease/revoke", {"ID": str(lease)})
        except NotFound:
            pass  # it has run out

    def _call(self, what: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the endpoints in turn, the one that answered last first; each has its share of the time that is left."""
        until = time.monotonic() + self._seconds
        first, many = self._first, len(self._endpoints)
        failed = []
        for turn in range(many):
            which = (first + turn) % many
            left = max(0.1, until - time.monotonic())
            try:
                answer = self._ask_as_user(self._endpoints[which], what, json.dumps(message).encode(), left / (many - turn))
            except Unavailable as error:
                failed.append(str(error))
                continue
            self._first = which
            return answer
        raise Unavailable(f"etcd does not answer ({'; '.join(failed)}); start it, or name the endpoints where it is")

    def _ask_as_user(self, endpoint: str, what: str, body: bytes, seconds: float) -> dict[str, Any]:
        if not self._access.user:
            return self._ask(endpoint, what, body, seconds)
        token = self._token or self._authenticate(endpoint, seconds)
        try:
            return self._ask(endpoint, what, body, seconds, token)
        except _BadToken:
            return self._ask(endpoint, what, body, seconds, self._authenticate(endpoint, seconds))

    def _authenticate(self, endpoint: str, seconds: float) -> str:
        login = {"name": self._access.user, "password": self._access.secret()}
        answer = self._ask(endpoint, "auth/authenticate", json.dumps(login).encode(), seconds)
        token = answer.get("token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise StoreError(f"{endpoint}: etcd gives no token to {self._access.user}")
        self._token = token
        return token

    def _ask(self, endpoint: str, what: str, body: bytes, seconds: float, token: str = "") -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        request = urllib.request.Request(f"{endpoint}/v3/{what}", body, headers)
        try:
            with self._opener.open(request, timeout=seconds) as answered:
                text = answered.read(_ANSWER_BYTES + 1)
        except HTTPError as error:
            raise _refusal(endpoint, error) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            why = (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__
            raise Unavailable(f"{endpoint}: {why}{_hint(endpoint, reason)}") from error
        message = _message(endpoint, text)
        if isinstance(refused := message.get("error"), dict) and refused.get("grpc_code") == _UNAUTHENTICATED:  # of a stream
            raise _BadToken(f"{endpoint}: {refused.get('message')}")
        return message


def _hint(endpoint: str, reason: object) -> str:
    """What to do about an error of TLS."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f" ({reason.verify_message}); give the authority of its certificate in {VARIABLES['ca_file']}"
    if isinstance(reason, ssl.SSLError):
        return f"; where it asks for a certificate of its clients, give {VARIABLES['cert_file']} and {VARIABLES['key_file']}"
    if isinstance(reason, ConnectionResetError) and endpoint.startswith("http://"):
        return f"; where it is spoken to by https, give {VARIABLES['ca_file']}"
    return ""


def _refusal(endpoint: str, error: HTTPError) -> StoreError:
    """What an HTTP status says. etcd explains it in JSON; other servers do not."""
    # Late, overloaded, without a leader: another may do. Without a majority some calls end as an "unknown" error, 500.
    kind = Unavailable if error.code >= 500 or error.code == 429 else StoreError
    try:
        answer = json.loads(error.read(4096))
        answer = answer["error"] if isinstance(answer["error"], dict) else answer  # as streams say it
        code, message = int(answer["code"] if "code" in answer else answer["grpc_code"]), str(answer["message"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, HTTPException):
        return kind(f"{endpoint}: HTTP {error.code}, which is no answer of etcd; name the port that it serves clients on")
    if code == _UNAUTHENTICATED or _OLD_TOKEN in message:
        return _BadToken(f"{endpoint}: {message}")
    if "user name is empty" in message:
        return Refused(f"{endpoint}: {message}; give {VARIABLES['user']} and {VARIABLES['password_file']}")
    if code in _DENIED or "authentication failed" in message:
        return Refused(f"{endpoint}: {message}")
    if code == _NOT_FOUND:
        return NotFound(f"{endpoint}: {message}")
    return kind(f"{endpoint}: {message}")


def _message(endpoint: str, text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise StoreError(f"{endpoint}: {len(text)} bytes that are no answer of etcd; name the port that it serves clients on")
    return message


def _text(value: str | bytes) -> str:
    """Bytes as the gateway wants them."""
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def _item(found: Mapping[str, Any]) -> Item:
    try:
        key = b64decode(found["key"]).decode()
        return Item(key, b64decode(found.get("value", "")), int(found["mod_revision"]))
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"etcd answers what can't be read: {error!r}") from error


def _number(found: Mapping[str, Any], key: str) -> int:
    try:
        return int(found[key])
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"etcd answers without {key}: {error!r}") from error
