"""Who belongs to a cluster, kept in etcd: nodes announce themselves, clients ask who there is.

    /ckpt/<cluster>/members/<name>      under the lease of the node: it is up
    /ckpt/<cluster>/known/<name>        without a lease: it belongs here, whether it is up or not

Both hold the same JSON: address, domain (a path), weight, device. A node that ends takes its first key with it, one that
dies loses it with its lease; the second stays, because the ring names the members that keep records, and one of them that is
down is a member that does not answer, not one less. What etcd says about who is up is a hint; calls show it anyway.

Whoever writes to etcd decides where clients look for data, and where they send their token: see etcd_access.py and SECURITY.md.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ckpt.aggregator.cluster.etcd_access import EtcdCredentials
from ckpt.aggregator.cluster.etcd_client import EtcdClient, EtcdItem
from ckpt.storage.base.checked_decode import Malformed, decode, read_json
from ckpt.storage.base.errors import CkptError, InvalidArgument, Unavailable

log = logging.getLogger("ckpt")

ETCD_SCHEME = "etcd"
LEASE_SECONDS = 10.0
"""How long a dead node is shown as up. Renewed three times in that."""

_ADDRESS_PATTERN = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.\-]+):\d{1,5}")
_ENDPOINT_PATTERN = re.compile(f"(https?://)?{_ADDRESS_PATTERN.pattern}")
_MAX_WEIGHT = 1e9
_CLUSTER_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


@dataclass(frozen=True, slots=True)
class AnnouncedNode:
    """What a node says of itself."""

    address: str
    """host:port where clients reach it."""
    domain: str = ""
    """Its failure domains as a path, the widest first."""
    weight: float = 1.0
    device: str = ""
    """Which disk it is, so that two nodes under one name are found out."""


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A member of a cluster."""

    name: str
    node: AnnouncedNode
    is_up: bool
    """Whether it holds a lease. A hint."""


# --- members -----------------------------------------------------------------------------------------------------


def announce(
    endpoints: Sequence[str], cluster: str, name: str, node: AnnouncedNode, lease_seconds: float = LEASE_SECONDS
) -> Announcement:
    """Register a member, for as long as the answer is not closed.

    An etcd that does not answer is no error: a node serves without, and is registered as soon as it can be. Raises
    InvalidArgument where another node is up under this name.
    """
    check_address(node.address)  # before clients have to refuse it
    return Announcement(EtcdClient(endpoints, min(5.0, lease_seconds / 3)), check_cluster(cluster), name, node, lease_seconds)


class Announcement:
    """A member that is registered, or is going to be: a thread keeps the lease, and takes a new one where it was lost."""

    def __init__(self, etcd: EtcdClient, cluster: str, name: str, node: AnnouncedNode, lease_seconds: float) -> None:
        self._etcd = etcd
        self._leased_key, self._lasting_key = f"{_key_prefix(cluster)}members/{name}", f"{_key_prefix(cluster)}known/{name}"
        self._description = f"{name} in cluster {cluster}"
        self._node = node
        self._lease_seconds = lease_seconds
        self._last_error = ""
        self.lease: int | None = None
        """None while it is not registered."""
        try:
            self._renew_lease()
        except Unavailable as error:
            self._log_first_failure(error)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_closed, name="ckpt-announce", daemon=True)
        self._thread.start()

    def _renew_until_closed(self) -> None:
        while not self._stop.wait(self._lease_seconds / 3):
            try:
                self._renew_lease()
            except CkptError as error:
                self._log_first_failure(error)
            else:
                self._log_recovery()
        self._revoke_lease()

    def _renew_lease(self) -> None:
        """Keep the lease; register anew where etcd does not know it, after a long pause or the loss of its data."""
        if self.lease is None or not self._etcd.keep_lease_alive(self.lease):
            self.lease = None
            self.lease = self._register()

    def _register(self) -> int:
        value = json.dumps(asdict(self._node)).encode()
        lease = self._etcd.grant_lease(self._lease_seconds)
        while True:  # until nobody comes in between, which only a node under the same name could
            current = self._etcd.get(self._leased_key)
            other = _parse_announcement(current) if current.revision else None
            if other is not None and other.device != self._node.device:
                self._etcd.revoke_lease(lease)
                raise InvalidArgument(
                    f"{self._description} is another node (device {other.device[:8]}), which is up or was "
                    f"{self._lease_seconds:g} seconds ago; "
                    "give each node an address of its own"
                )
            if self._etcd.put_leased(current, value, lease, self._lasting_key):
                return lease

    def _log_first_failure(self, error: CkptError) -> None:
        """Say it once, not every few seconds."""
        if not self._last_error:
            log.warning("can't announce %s, and go on trying: %s", self._description, error)
        self._last_error = str(error)

    def _log_recovery(self) -> None:
        if self._last_error:
            log.info("announced %s now", self._description)
        self._last_error = ""

    def _revoke_lease(self) -> None:
        try:
            if self.lease is not None:
                self._etcd.revoke_lease(self.lease)
        except CkptError as error:
            log.warning("%s stays announced for %g seconds: %s", self._description, self._lease_seconds, error)

    def close(self) -> None:
        """Withdraw. Takes no longer than a few calls to an etcd that does not answer."""
        self._stop.set()
        self._thread.join(self._lease_seconds)


def list_members(
    endpoints: Sequence[str], cluster: str, seconds: float = 5.0, access: EtcdCredentials | None = None
) -> tuple[ClusterMember, ...]:
    """All that ever announced themselves and were not deleted, up or not, by name. Who can't be read is passed over: a warning
    names the key."""
    folder = _key_prefix(check_cluster(cluster))
    items = {item.key: item for item in EtcdClient(endpoints, seconds, access).range(folder)}
    found = []
    for key in sorted(items):
        if key.startswith(f"{folder}known/"):
            name = key.removeprefix(f"{folder}known/")
            live = items.get(f"{folder}members/{name}")
            facts = (live and _parse_announcement(live)) or _parse_announcement(items[key])
            if facts is not None:
                found.append(ClusterMember(name, facts, live is not None))
    return tuple(found)


def remove_announcement(
    endpoints: Sequence[str], cluster: str, name: str, seconds: float = 5.0, access: EtcdCredentials | None = None
) -> None:
    """Let a member belong to a cluster no more. One that is up announces itself again."""
    EtcdClient(endpoints, seconds, access).delete(f"{_key_prefix(check_cluster(cluster))}known/{name}")


def _parse_announcement(item: EtcdItem) -> AnnouncedNode | None:
    """The value of a key. What a newer version adds is ignored; None, and a warning, where it can't be read."""
    try:
        facts = decode(AnnouncedNode, read_json(item.value))
        check_address(facts.address)
        if not 0 <= facts.weight < _MAX_WEIGHT:
            raise Malformed(f"{facts.weight} is no weight")
        return facts
    except ValueError as error:  # Malformed, InvalidArgument
        log.warning("%s in etcd can't be read, and is passed over (%s); delete it, the node writes it again", item.key, error)
        return None


def _key_prefix(cluster: str) -> str:
    return f"/ckpt/{cluster}/"


# --- names -------------------------------------------------------------------------------------------------------


def parse_endpoints(text: str) -> tuple[str, ...]:
    """https://host:port,host:port, as they are written; EtcdAccess.endpoint says how one without a scheme is spoken to. Raises
    InvalidArgument."""
    found = tuple(item.rstrip("/") for item in text.split(",") if item)
    invalid = [item for item in found if not _ENDPOINT_PATTERN.fullmatch(item)]
    if invalid or not found:
        raise InvalidArgument(f"{text}: {invalid[0] if invalid else 'nothing'} is no endpoint of etcd; write http://host:2379")
    return found


def check_address(text: str) -> str:
    """The address of a node, if it can be one; a path would lead a client to its own disks. Raises InvalidArgument."""
    if not _ADDRESS_PATTERN.fullmatch(text):
        raise InvalidArgument(f"{text!r} is no address of a node; write host:port")
    return text


def check_cluster(name: str) -> str:
    """The name of a cluster, if it can be one. Raises InvalidArgument."""
    if not _CLUSTER_PATTERN.fullmatch(name):
        raise InvalidArgument(f"{name!r} can't name a cluster: use letters, digits, '-', '_' and '.'")
    return name


def parse_etcd_url(url: str) -> tuple[tuple[str, ...], str]:
    """The endpoints and the cluster of etcd://host:2379,host:2379/CLUSTER. Raises InvalidArgument."""
    scheme, _, rest = url.partition("://")
    hosts, _, cluster = rest.partition("/")
    if scheme != ETCD_SCHEME or not hosts or "://" in rest:
        raise InvalidArgument(f"{url}: write a list of members, or etcd://host:2379,host:2379/CLUSTER")
    return parse_endpoints(hosts), check_cluster(cluster)
