"""A client of etcd for a few calls, through the JSON gateway of its client port (etcd 3.4 and later)."""

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
from ckpt.aggregator.cluster.etcd_connection import connection_handlers
from ckpt.storage.base.checked_decode import read_json
from ckpt.storage.base.errors import InvalidArgument, LoginLost, NotFound, Refused, StoreError, Unavailable
from ckpt.storage.node.client_credentials import is_loopback

ETCD_SECONDS = 5.0
"""How long a call waits for an answer."""

_MAX_ANSWER_BYTES = 16 << 20
_NOT_FOUND, _DENIED, _OUT_OF_RANGE, _UNAUTHENTICATED = 5, {7, 16}, 11, 16
"""gRPC status codes."""
_RANGE_TRIES = 3
_OLD_TOKEN_MESSAGE = "revision of auth store is old"
_PORT_ADVICE = "give the client port of etcd"
_LOGIN_ADVICE = f"give {ETCD_VARIABLES['user']} and {ETCD_VARIABLES['password_file']}"


@dataclass(frozen=True, slots=True)
class EtcdItem:
    """A key of etcd and its value."""

    key: str
    value: bytes
    revision: int
    """The revision of its last change; 0 where the key does not exist."""


class _BadToken(LoginLost):
    """etcd refuses the token of this client: tokens expire, and are lost when etcd restarts."""


class Compacted(StoreError):
    """The requested revision is older than the last compaction, so etcd does not have it any more."""


class _Full(Unavailable):
    """etcd has reached its quota, and refuses writes until its NOSPACE alarm is disarmed. All endpoints do."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: etcd never sends one, and it would carry the token to any host."""

    def redirect_request(self, *_: object) -> None:
        return None


class EtcdClient:
    """Calls to etcd. It keeps no connection open, and is safe to use from many threads.

    Threads set `_last_answering` and `_token` without a lock: the value of any of them serves the next call.

    credentials: those of the environment by default. All calls raise Unavailable when no endpoint answers within the deadline,
    and Refused when etcd requires authentication or denies the call.
    """

    def __init__(
        self, endpoints: Sequence[str], deadline_seconds: float = ETCD_SECONDS, credentials: EtcdCredentials | None = None
    ) -> None:
        self._credentials = credentials = etcd_credentials_from_environment() if credentials is None else credentials
        self._endpoints = tuple(map(credentials.endpoint_url, endpoints))
        self._deadline_seconds = deadline_seconds
        self._last_answering = 0
        self._token = ""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]  # not by a proxy
        if any(endpoint.startswith("https://") for endpoint in self._endpoints):
            handlers += connection_handlers(credentials.tls_context())
        elif credentials.cert_file or credentials.key_file:
            raise InvalidArgument(
                f"etcd: {ETCD_VARIABLES['cert_file']} is used by https only; give {ETCD_VARIABLES['ca_file']}, too"
            )
        else:
            handlers += connection_handlers(None)
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def host_ports(self) -> list[tuple[str, int]]:
        """The host and port of each endpoint."""
        parts = map(urlsplit, self._endpoints)
        return [(part.hostname or "", part.port or (443 if part.scheme == "https" else 80)) for part in parts]

    @property
    def is_loopback(self) -> bool:
        """Whether all endpoints are on this host."""
        return all(is_loopback(host) for host, _ in self.host_ports)

    def range(self, prefix: str, first: str = "", page_keys: int = 0) -> list[EtcdItem]:
        """Return the keys that begin with a prefix, from `first` on, all of the same revision.

        page_keys: how many keys one call returns, so that no answer is too long; 0: all keys in one call.
        """
        for tries_left in reversed(range(_RANGE_TRIES)):
            try:
                return self._range(prefix, first, page_keys)
            except Compacted:  # between two pages
                if not tries_left:
                    raise
        raise AssertionError

    def _range(self, prefix: str, first: str, page_keys: int) -> list[EtcdItem]:
        """Return the keys as `range` does. Raises Compacted if their revision is compacted between two pages."""
        end = prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
        message = {"key": _to_base64(first or prefix), "range_end": _to_base64(end), "limit": str(page_keys)}
        items: list[EtcdItem] = []
        while True:
            answer = self._call("kv/range", message)
            page = [_parse_item(found) for found in answer.get("kvs", ())]
            items += page
            if not page or not answer.get("more"):
                return items
            message["key"] = _to_base64(f"{page[-1].key}\0")  # the next possible key
            message.setdefault("revision", str(_parse_int(answer.get("header", {}), "revision")))  # that of the first page

    def get(self, key: str) -> EtcdItem:
        """Return one key; its value is empty and its revision 0 where it does not exist."""
        found = self._call("kv/range", {"key": _to_base64(key)}).get("kvs", ())
        return _parse_item(found[0]) if found else EtcdItem(key, b"", 0)

    def put(self, key: str, value: bytes) -> None:
        """Write a key, whether it exists or not."""
        self._call("kv/put", {"key": _to_base64(key), "value": _to_base64(value)})

    def put_new(self, values: Mapping[str, bytes]) -> bool:
        """Write all of these keys if none of them exists; return whether it was done."""
        absent = [{"key": _to_base64(key), "target": "VERSION", "result": "EQUAL", "version": "0"} for key in values]
        puts = [{"request_put": {"key": _to_base64(key), "value": _to_base64(value)}} for key, value in values.items()]
        return bool(self._call("kv/txn", {"compare": absent, "success": puts}).get("succeeded"))

    def replace(self, expected: EtcdItem, value: bytes) -> int:
        """Write a key and return its new revision; return 0, and write nothing, if it was changed since `expected` was read."""
        put = {"request_put": {"key": _to_base64(expected.key), "value": _to_base64(value)}}
        answer = self._call("kv/txn", {"compare": [_is_unchanged(expected)], "success": [put]})
        return _parse_int(answer.get("header", {}), "revision") if answer.get("succeeded") else 0

    def put_leased(self, expected: EtcdItem, value: bytes, lease: int, lasting_key: str) -> bool:
        """Write a value to a key with a lease and to a lasting key; return whether it was done.

        Neither is written if the first key was changed since `expected` was read.
        """
        leased = {"key": _to_base64(expected.key), "value": _to_base64(value), "lease": str(lease)}
        puts = [{"request_put": put} for put in (leased, {"key": _to_base64(lasting_key), "value": _to_base64(value)})]
        answer = self._call("kv/txn", {"compare": [_is_unchanged(expected)], "success": puts})
        return bool(answer.get("succeeded"))

    def delete(self, key: str) -> None:
        """Delete a key. It is no error if the key does not exist."""
        self._call("kv/deleterange", {"key": _to_base64(key)})

    def delete_unchanged(self, expected: EtcdItem) -> bool:
        """Delete a key if it was not changed since `expected` was read; return whether it was done."""
        delete = {"request_delete_range": {"key": _to_base64(expected.key)}}
        answer = self._call("kv/txn", {"compare": [_is_unchanged(expected)], "success": [delete]})
        return bool(answer.get("succeeded"))

    def current_revision(self, key: str) -> int:
        """Return the current revision. key: any key that this client may read."""
        answer = self._call("kv/range", {"key": _to_base64(key), "count_only": True})
        return _parse_int(answer.get("header", {}), "revision")

    def compact(self, revision: int) -> None:
        """Make etcd forget what was replaced or deleted up to a revision. Raises Compacted if it has done so already."""
        self._call("kv/compaction", {"revision": str(revision)})

    def grant_lease(self, lease_seconds: float) -> int:
        """Return a new lease. etcd makes it longer where it is shorter than its own election timeout."""
        return _parse_int(self._call("lease/grant", {"TTL": str(max(1, round(lease_seconds)))}), "ID")

    def keep_lease_alive(self, lease: int) -> bool:
        """Restart the time of a lease; return False where the lease does not exist any more. Raises Unavailable."""
        answer = self._call("lease/keepalive", {"ID": str(lease)})
        if not isinstance(result := answer.get("result"), dict):  # the answer is a stream, whose errors have HTTP status 200
            raise Unavailable(
                f"etcd does not renew leases now ({answer.get('error')}); check it with `etcdctl endpoint health`"
            )
        return "TTL" in result

    def revoke_lease(self, lease: int) -> None:
        """End a lease, which deletes its keys."""
        try:
            self._call("lease/revoke", {"ID": str(lease)})
        except NotFound:
            pass  # it has expired

    def _call(self, method: str, message: Mapping[str, object]) -> dict[str, Any]:
        """Call the endpoints in turn, first the one that answered last. Each gets its share of the time that is left."""
        until = time.monotonic() + self._deadline_seconds
        first, count = self._last_answering, len(self._endpoints)
        failures = []
        for attempt in range(count):
            index = (first + attempt) % count
            remaining_seconds = max(0.1, until - time.monotonic())
            try:
                answer = self._ask_as_user(
                    self._endpoints[index], method, json.dumps(message).encode(), remaining_seconds / (count - attempt)
                )
            except _Full:
                raise
            except Unavailable as error:
                failures.append(str(error))
                continue
            self._last_answering = index
            return answer
        raise Unavailable(f"etcd does not answer ({'; '.join(failures)}); start it, or give the endpoints where it runs")

    def _ask_as_user(self, endpoint: str, method: str, body: bytes, seconds: float) -> dict[str, Any]:
        if not self._credentials.user:
            return self._ask(endpoint, method, body, seconds)
        token = self._token or self._authenticate(endpoint, seconds)
        try:
            return self._ask(endpoint, method, body, seconds, token)
        except _BadToken:
            return self._ask(endpoint, method, body, seconds, self._authenticate(endpoint, seconds))

    def _authenticate(self, endpoint: str, seconds: float) -> str:
        login = {"name": self._credentials.user, "password": self._read_password()}
        answer = self._ask(endpoint, "auth/authenticate", json.dumps(login).encode(), seconds)
        token = answer.get("token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise StoreError(
                f"{endpoint}: the answer to the login of {self._credentials.user} has no valid token; {_PORT_ADVICE}"
            )
        self._token = token
        return token

    def _read_password(self) -> str:
        """Return the password for a login. Its file may be missing or empty for a moment while it is being replaced.

        Raises InvalidArgument before the first login, and LoginLost after it, because a later call reads the file again.
        """
        try:
            return self._credentials.read_password()
        except InvalidArgument as error:
            if not self._token:
                raise
            raise LoginLost(f"no login to etcd: {error}") from error

    def _ask(self, endpoint: str, method: str, body: bytes, seconds: float, token: str = "") -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        request = urllib.request.Request(f"{endpoint}/v3/{method}", body, headers)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                text = response.read(_MAX_ANSWER_BYTES + 1)
        except HTTPError as error:
            raise _http_error(endpoint, error) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            cause = (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__
            raise Unavailable(f"{endpoint}: {cause}{_tls_advice(endpoint, reason)}") from error
        answer = _parse_answer(endpoint, text)
        # A stream reports this error with HTTP status 200.
        if isinstance(failure := answer.get("error"), dict) and failure.get("grpc_code") == _UNAUTHENTICATED:
            raise _BadToken(f"{endpoint}: {failure.get('message')}; {_LOGIN_ADVICE}")
        return answer


def _tls_advice(endpoint: str, reason: object) -> str:
    """Return the end of a message: what to do about an error of TLS; empty for other errors."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f" ({reason.verify_message}); give the authority of its certificate in {ETCD_VARIABLES['ca_file']}"
    if isinstance(reason, ssl.SSLError):
        names = f"{ETCD_VARIABLES['cert_file']} and {ETCD_VARIABLES['key_file']}"
        return f"; if etcd requires client certificates, give {names}"
    if isinstance(reason, ConnectionResetError) and endpoint.startswith("http://"):
        return f"; if etcd serves https, give {ETCD_VARIABLES['ca_file']}"
    return ""


def _http_error(endpoint: str, error: HTTPError) -> StoreError:
    """Return the error for an HTTP status. etcd explains it in JSON; other servers do not."""
    # Another endpoint may answer where this one is late, overloaded or without a leader. Without a majority some calls end with
    # an "unknown" error and the status 500.
    kind = Unavailable if error.code >= 500 or error.code == 429 else StoreError
    try:
        answer = read_json(error.read(4096))
        answer = answer["error"] if isinstance(answer["error"], dict) else answer  # streams nest the error
        code, message = int(answer["code"] if "code" in answer else answer["grpc_code"]), str(answer["message"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, HTTPException):
        return kind(f"{endpoint}: HTTP status {error.code} is not an answer of etcd; {_PORT_ADVICE}")
    if code == _UNAUTHENTICATED or _OLD_TOKEN_MESSAGE in message:
        return _BadToken(f"{endpoint}: {message}; {_LOGIN_ADVICE}")
    if "user name is empty" in message:
        return Refused(f"{endpoint}: {message}; {_LOGIN_ADVICE}")
    if code in _DENIED or "authentication failed" in message:
        return Refused(f"{endpoint}: {message}; {_LOGIN_ADVICE} of a user with the permission")
    if code == _NOT_FOUND:
        return NotFound(f"{endpoint}: {message}")
    if code == _OUT_OF_RANGE and "has been compacted" in message:
        return Compacted(f"{endpoint}: {message}; read it anew")
    if "database space exceeded" in message:
        return _Full(
            f"etcd is full ({endpoint} has a NOSPACE alarm), and refuses writes; run `etcdctl compact REVISION`, "
            "`etcdctl defrag` and `etcdctl alarm disarm`"
        )
    return kind(f"{endpoint}: {message}; see the log of etcd")


def _parse_answer(endpoint: str, text: bytes) -> dict[str, Any]:
    try:
        message = read_json(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise StoreError(f"{endpoint}: {len(text)} bytes are not an answer of etcd; {_PORT_ADVICE}")
    return message


def _is_unchanged(item: EtcdItem) -> dict[str, str]:
    """Return the condition of a transaction that a key was not changed since it was read."""
    return {"key": _to_base64(item.key), "target": "MOD", "result": "EQUAL", "mod_revision": str(item.revision)}


def _to_base64(value: str | bytes) -> str:
    """Return bytes in the encoding of the JSON gateway."""
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def _parse_item(found: Mapping[str, Any]) -> EtcdItem:
    try:
        key = b64decode(found["key"]).decode()
        return EtcdItem(key, b64decode(found.get("value", "")), int(found["mod_revision"]))
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"an answer of etcd can't be read ({error!r}); {_PORT_ADVICE}") from error


def _parse_int(found: Mapping[str, Any], key: str) -> int:
    try:
        return int(found[key])
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"an answer of etcd has no valid {key} ({error!r}); {_PORT_ADVICE}") from error
