"""Who belongs to a cluster, kept in etcd: nodes announce themselves, clients ask who there is.

    /ckpt/<cluster>/members/<name>      under the lease of the node: it is up
    /ckpt/<cluster>/known/<name>        without a lease: it belongs here, whether it is up or not

Both hold the same JSON: address, domain (a path), weight, device. A node that ends takes its first key with it, one that
dies loses it with its lease; the second stays, because the ring names the members that keep records, and one of them that is
down is a member that does not answer, not one less. What etcd says about who is up is a hint; calls show it anyway.

etcd is spoken to through the JSON gateway of its client port (3.4 and later).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from ckpt.storage.errors import CkptError, InvalidArgument, NotFound, Refused, StoreError, Unavailable

log = logging.getLogger("ckpt")

SCHEME = "etcd"
TTL_SECONDS = 10.0
"""How long a dead node is shown as up. Renewed three times in that."""

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.\-]+):\d{1,5}")
_ENDPOINT = re.compile(f"https?://{_ADDRESS.pattern}")
_CLUSTER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_ANSWER_BYTES = 16 << 20
_NOT_FOUND, _DENIED = 5, {7, 16}
"""Codes of gRPC."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a node says of itself."""

    address: str
    """host:port where clients reach it."""
    domain: str = ""
    """Its failure domains as a path, the widest first."""
    weight: float = 1.0
    device: str = ""
    """Which disk it is, so that two nodes under one name are found out."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A member of a cluster."""

    name: str
    facts: Facts
    up: bool
    """Whether it holds a lease. A hint."""


@dataclass(frozen=True, slots=True)
class Item:
    """A key of etcd."""

    key: str
    value: bytes
    revision: int
    """When it was changed last; 0 never."""


# --- etcd --------------------------------------------------------------------------------------------------------


class Etcd:
    """A few calls to etcd. Holds no connection; safe to use from many threads.

    All raise Unavailable when no endpoint answers within the deadline, Refused when etcd wants to know who asks.
    """

    def __init__(self, endpoints: Sequence[str], seconds: float = 5.0) -> None:
        self._endpoints = tuple(endpoints)
        self._seconds = seconds
        self._first = 0
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is a neighbour: not by a proxy

    def range(self, prefix: str, first: str = "") -> list[Item]:
        """The keys that begin with a prefix, from `first` on, all as of one moment."""
        after = prefix.encode()[:-1] + bytes([prefix.encode()[-1] + 1])
        answer = self._call("kv/range", {"key": _text(first or prefix), "range_end": _text(after)})
        return [_item(told) for told in answer.get("kvs", ())]

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
                answer = self._ask(self._endpoints[which], what, json.dumps(message).encode(), left / (many - turn))
            except Unavailable as error:
                failed.append(str(error))
                continue
            self._first = which
            return answer
        raise Unavailable(f"etcd does not answer ({'; '.join(failed)}); start it, or name the endpoints where it is")

    def _ask(self, endpoint: str, what: str, body: bytes, seconds: float) -> dict[str, Any]:
        request = urllib.request.Request(f"{endpoint}/v3/{what}", body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=seconds) as answered:
                text = answered.read(_ANSWER_BYTES + 1)
        except HTTPError as error:
            raise _refusal(endpoint, error) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            told = (reason.strerror if isinstance(reason, OSError) else None) or str(reason) or type(reason).__name__
            raise Unavailable(f"{endpoint}: {told}") from error
        return _message(endpoint, text)


def _refusal(endpoint: str, error: HTTPError) -> StoreError:
    """What an HTTP status says. etcd explains it in JSON; other servers do not."""
    # Late, overloaded, without a leader: another may do. Without a majority some calls end as an "unknown" error, 500.
    kind = Unavailable if error.code >= 500 or error.code == 429 else StoreError
    try:
        told = json.loads(error.read(4096))
        told = told["error"] if isinstance(told["error"], dict) else told  # as streams say it
        code, message = int(told["code"] if "code" in told else told["grpc_code"]), str(told["message"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, HTTPException):
        return kind(f"{endpoint}: HTTP {error.code}, which is no answer of etcd; name the port that it serves clients on")
    if code in _DENIED:
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


def _item(told: Mapping[str, Any]) -> Item:
    try:
        key = b64decode(told["key"]).decode()
        return Item(key, b64decode(told.get("value", "")), int(told["mod_revision"]))
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"etcd answers what can't be read: {error!r}") from error


def _number(told: Mapping[str, Any], key: str) -> int:
    try:
        return int(told[key])
    except (KeyError, ValueError, TypeError) as error:
        raise StoreError(f"etcd answers without {key}: {error!r}") from error


# --- members -----------------------------------------------------------------------------------------------------


def announce(endpoints: Sequence[str], cluster: str, name: str, facts: Facts, ttl: float = TTL_SECONDS) -> Announcement:
    """Register a member, for as long as the answer is not closed.

    An etcd that does not answer is no error: a node serves without, and is registered as soon as it can be. Raises
    InvalidArgument where another node is up under this name.
    """
    check_address(facts.address)  # before clients have to refuse it
    return Announcement(Etcd(endpoints, min(5.0, ttl / 3)), check_cluster(cluster), name, facts, ttl)


class Announcement:
    """A member that is registered, or is going to be: a thread keeps the lease, and takes a new one where it was lost."""

    def __init__(self, etcd: Etcd, cluster: str, name: str, facts: Facts, ttl: float) -> None:
        self._etcd = etcd
        self._member, self._known = f"{_folder(cluster)}members/{name}", f"{_folder(cluster)}known/{name}"
        self._what = f"{name} in cluster {cluster}"
        self._facts = facts
        self._ttl = ttl
        self._trouble = ""
        self.lease: int | None = None
        """None while it is not registered."""
        try:
            self._renew()
        except Unavailable as error:
            self._failed(error)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-announce", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._ttl / 3):
            try:
                self._renew()
            except CkptError as error:
                self._failed(error)
            else:
                self._succeeded()
        self._withdraw()

    def _renew(self) -> None:
        """Keep the lease; register anew where etcd does not know it, after a long pause or the loss of its data."""
        if self.lease is None or not self._etcd.keep_alive(self.lease):
            self.lease = None
            self.lease = self._register()

    def _register(self) -> int:
        value = json.dumps(asdict(self._facts)).encode()
        lease = self._etcd.grant(self._ttl)
        while True:  # until nobody comes in between, which only a node under the same name could
            there = self._etcd.get(self._member)
            if there.revision and (device := _facts(there).device) != self._facts.device:
                self._etcd.revoke(lease)
                raise InvalidArgument(
                    f"{self._what} is another node (device {device[:8]}), which is up or was {self._ttl:g} seconds ago; give "
                    "each node an address of its own"
                )
            if self._etcd.put_both(there, value, lease, self._known):
                return lease

    def _failed(self, error: CkptError) -> None:
        """Say it once, not every few seconds."""
        if not self._trouble:
            log.warning("can't announce %s, and go on trying: %s", self._what, error)
        self._trouble = str(error)

    def _succeeded(self) -> None:
        if self._trouble:
            log.info("announced %s now", self._what)
        self._trouble = ""

    def _withdraw(self) -> None:
        try:
            if self.lease is not None:
                self._etcd.revoke(self.lease)
        except CkptError as error:
            log.warning("%s stays announced for %g seconds: %s", self._what, self._ttl, error)

    def close(self) -> None:
        """Withdraw. Takes no longer than a few calls to an etcd that does not answer."""
        self._stop.set()
        self._thread.join(self._ttl)


def members(endpoints: Sequence[str], cluster: str, seconds: float = 5.0) -> tuple[Registered, ...]:
    """All that ever announced themselves and were not deleted, up or not, by name."""
    folder = _folder(check_cluster(cluster))
    items = {item.key: item for item in Etcd(endpoints, seconds).range(folder)}
    found = []
    for key in sorted(items):
        if key.startswith(f"{folder}known/"):
            name = key.removeprefix(f"{folder}known/")
            lively = items.get(f"{folder}members/{name}")
            found.append(Registered(name, _facts(lively or items[key]), lively is not None))
    return tuple(found)


def forget(endpoints: Sequence[str], cluster: str, name: str, seconds: float = 5.0) -> None:
    """Let a member belong to a cluster no more. One that is up announces itself again."""
    Etcd(endpoints, seconds).delete(f"{_folder(check_cluster(cluster))}known/{name}")


def _facts(item: Item) -> Facts:
    """The value of a key. What a later version adds is passed over."""
    try:
        told = json.loads(item.value)
        domain, device = str(told.get("domain", "")), str(told.get("device", ""))
        return Facts(check_address(told["address"]), domain, float(told.get("weight", 1.0)), device)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # InvalidArgument is a ValueError
        raise StoreError(f"{item.key} in etcd can't be read ({error!r}); delete it, the node writes it again") from error


def _folder(cluster: str) -> str:
    return f"/ckpt/{cluster}/"


# --- names -------------------------------------------------------------------------------------------------------


def parse_endpoints(text: str) -> tuple[str, ...]:
    """http://host:port,host:port. Raises InvalidArgument."""
    found = tuple(item.rstrip("/") if "://" in item else f"http://{item}" for item in text.split(",") if item)
    wrong = [item for item in found if not _ENDPOINT.fullmatch(item)]
    if wrong or not found:
        raise InvalidArgument(f"{text}: {wrong[0] if wrong else 'nothing'} is no endpoint of etcd; write http://host:2379")
    return found


def check_address(text: str) -> str:
    """The address of a node, if it can be one; a path would lead a client to its own disks. Raises InvalidArgument."""
    if not _ADDRESS.fullmatch(text):
        raise InvalidArgument(f"{text!r} is no address of a node; write host:port")
    return text


def check_cluster(name: str) -> str:
    """The name of a cluster, if it can be one. Raises InvalidArgument."""
    if not _CLUSTER.fullmatch(name):
        raise InvalidArgument(f"{name!r} can't name a cluster: use letters, digits, '-', '_' and '.'")
    return name


def parse_url(url: str) -> tuple[tuple[str, ...], str]:
    """The endpoints and the cluster of etcd://host:2379,host:2379/CLUSTER. Raises InvalidArgument."""
    scheme, _, rest = url.partition("://")
    hosts, _, cluster = rest.partition("/")
    if scheme != SCHEME or not hosts or "://" in rest:
        raise InvalidArgument(f"{url}: write a list of members, or etcd://host:2379,host:2379/CLUSTER")
    return parse_endpoints(hosts), check_cluster(cluster)
