"""The members of a cluster in etcd: nodes announce themselves there, and clients list them.

    /ckpt/<cluster>/members/<name>      with a lease of the node: the node is up
    /ckpt/<cluster>/known/<name>        without a lease: the node belongs to the cluster, whether it is up or not

The values of both keys are the same JSON: address, domain (a path), weight, device. A node that ends deletes its first key; a
node that dies loses it when its lease expires. The second key stays, because the record ring names the members that keep
records: one of them that is down counts as a member that does not answer. Which nodes are up according to etcd is only a hint;
only a call to a node shows whether it is up.

A process that can write to etcd decides where clients look for data and where they send their token: see etcd_access.py and
SECURITY.md.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ckpt.aggregator.cluster.etcd_access import EtcdCredentials
from ckpt.aggregator.cluster.etcd_client import ETCD_SECONDS, EtcdClient, EtcdItem
from ckpt.aggregator.placement.rendezvous_hash import MAX_WEIGHT
from ckpt.storage.base.checked_decode import Malformed, decode, read_json
from ckpt.storage.base.errors import CkptError, InvalidArgument, Unavailable
from ckpt.storage.node.client_credentials import ADDRESS_PATTERN, require_valid_port

log = logging.getLogger("ckpt")

ETCD_SCHEME = "etcd"
LEASE_SECONDS = 10.0
"""How long a dead node is listed as up. A node renews its lease three times in this time."""

_ENDPOINT_PATTERN = re.compile(f"(https?://)?{ADDRESS_PATTERN.pattern}")
_CLUSTER_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


@dataclass(frozen=True, slots=True)
class AnnouncedNode:
    """What a node announces about itself."""

    address: str
    """The host:port where clients reach it."""
    domain: str = ""
    """Its failure domains as a path, the widest first."""
    weight: float = 1.0
    device: str = ""
    """The identity of its device, which shows when two nodes use the same name."""


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """A member of a cluster."""

    name: str
    node: AnnouncedNode
    is_up: bool
    """Whether its lease is valid. A hint only."""


# --- members -----------------------------------------------------------------------------------------------------


def announce(
    endpoints: Sequence[str], cluster: str, name: str, node: AnnouncedNode, lease_seconds: float = LEASE_SECONDS
) -> Announcement:
    """Announce a node until the returned object is closed.

    It is no error if etcd does not answer: the node serves without it, and is announced when etcd answers. Raises
    InvalidArgument if another node is up under this name.
    """
    check_address(node.address)  # clients would refuse it
    return Announcement(
        EtcdClient(endpoints, min(ETCD_SECONDS, lease_seconds / 3)), check_cluster(cluster), name, node, lease_seconds
    )


class Announcement:
    """The announcement of one node. A thread renews its lease, and gets a new lease where the old one was lost.

    Only that thread changes `lease` and `_last_error` once it runs.
    """

    def __init__(self, etcd: EtcdClient, cluster: str, name: str, node: AnnouncedNode, lease_seconds: float) -> None:
        self._etcd = etcd
        self._leased_key, self._lasting_key = f"{_key_prefix(cluster)}members/{name}", f"{_key_prefix(cluster)}known/{name}"
        self._description = f"{name} in cluster {cluster}"
        self._node = node
        self._lease_seconds = lease_seconds
        self._last_error = ""
        self.lease: int | None = None
        """None while the node is not announced."""
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
            except Exception as error:  # also a lack of memory: without this thread, the node would count as gone
                self._log_first_failure(error)
            else:
                self._log_recovery()
        self._revoke_lease()

    def _renew_lease(self) -> None:
        """Renew the lease. Announce the node again where etcd has lost the lease, after a long pause or a loss of its data."""
        if self.lease is None or not self._etcd.keep_lease_alive(self.lease):
            self.lease = None
            self.lease = self._register()

    def _register(self) -> int:
        value = json.dumps(asdict(self._node)).encode()
        lease = self._etcd.grant_lease(self._lease_seconds)
        while True:  # only another node under the same name can change the key between the two calls
            current = self._etcd.get(self._leased_key)
            other = _parse_announcement(current) if current.revision else None
            if other is not None and other.device != self._node.device:
                self._etcd.revoke_lease(lease)
                raise InvalidArgument(
                    f"{self._description} is another node (device {other.device[:8]}), which is up or was "
                    f"{self._lease_seconds:g} seconds ago; give each node an address of its own"
                )
            if self._etcd.put_leased(current, value, lease, self._lasting_key):
                return lease

    def _log_first_failure(self, error: Exception) -> None:
        """Log the first failure in a row only: the renewal is tried every few seconds."""
        if not self._last_error:
            log.warning("can't announce %s, and keep trying: %s", self._description, error)
        self._last_error = str(error)

    def _log_recovery(self) -> None:
        if self._last_error:
            log.info("announced %s", self._description)
        self._last_error = ""

    def _revoke_lease(self) -> None:
        try:
            if self.lease is not None:
                self._etcd.revoke_lease(self.lease)
        except CkptError as error:
            log.warning(
                "can't withdraw the announcement of %s, which expires in %g seconds: %s",
                self._description,
                self._lease_seconds,
                error,
            )

    def close(self) -> None:
        """Withdraw the announcement. It waits for at most the time of a lease."""
        self._stop.set()
        self._thread.join(self._lease_seconds)


def list_members(
    endpoints: Sequence[str], cluster: str, seconds: float = ETCD_SECONDS, credentials: EtcdCredentials | None = None
) -> tuple[ClusterMember, ...]:
    """Return all nodes that ever announced themselves and were not deleted, up or not, ordered by name.

    A value that can't be read is skipped with a warning that names its key. seconds: the deadline of the call. credentials:
    those of the environment by default. Raises InvalidArgument, and the errors of `EtcdClient`.
    """
    folder = _key_prefix(check_cluster(cluster))
    items = {item.key: item for item in EtcdClient(endpoints, seconds, credentials).range(folder)}
    found = []
    for key in sorted(items):
        if key.startswith(f"{folder}known/"):
            name = key.removeprefix(f"{folder}known/")
            leased = items.get(f"{folder}members/{name}")
            node = (leased and _parse_announcement(leased)) or _parse_announcement(items[key])
            if node is not None:
                found.append(ClusterMember(name, node, leased is not None))
    return tuple(found)


def remove_announcement(
    endpoints: Sequence[str], cluster: str, name: str, seconds: float = ETCD_SECONDS, credentials: EtcdCredentials | None = None
) -> None:
    """Delete a node from a cluster. A node that is up announces itself again when it gets a new lease."""
    EtcdClient(endpoints, seconds, credentials).delete(f"{_key_prefix(check_cluster(cluster))}known/{name}")


def _parse_announcement(item: EtcdItem) -> AnnouncedNode | None:
    """Return the node that a value describes. Log a warning and return None if it can't be read.

    Fields that a newer version adds are ignored.
    """
    try:
        node = decode(AnnouncedNode, read_json(item.value))
        check_address(node.address)
        if not 0 <= node.weight < MAX_WEIGHT:
            raise Malformed(f"{node.weight} is not a weight")
        return node
    except ValueError as error:  # Malformed and InvalidArgument are subclasses
        log.warning("%s in etcd can't be read, and is skipped (%s); delete it, and restart the node", item.key, error)
        return None


def _key_prefix(cluster: str) -> str:
    return f"/ckpt/{cluster}/"


# --- names -------------------------------------------------------------------------------------------------------


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of a list such as https://host:port,host:port, as they are written. Raises InvalidArgument.

    `EtcdCredentials.endpoint_url` chooses the scheme of an endpoint without one.
    """
    found = tuple(item.rstrip("/") for item in text.split(",") if item)
    invalid = [item for item in found if not _ENDPOINT_PATTERN.fullmatch(item)]
    if invalid or not found:
        raise InvalidArgument(
            f"{text}: {invalid[0] if invalid else 'nothing'} is not an endpoint of etcd; write http://host:2379"
        )
    for item in found:
        require_valid_port(item, text)
    return found


def check_address(text: str) -> str:
    """Return the text if it is a host:port. Raises InvalidArgument: a client would read a path as a directory of its host."""
    if not ADDRESS_PATTERN.fullmatch(text):
        raise InvalidArgument(f"{text!r} is not an address of a node; write host:port")
    return text


def check_cluster(name: str) -> str:
    """Return the text if it can name a cluster. Raises InvalidArgument."""
    if not _CLUSTER_PATTERN.fullmatch(name):
        raise InvalidArgument(f"{name!r} can't name a cluster: use letters, digits, '-', '_' and '.'")
    return name


def parse_etcd_url(url: str) -> tuple[tuple[str, ...], str]:
    """Return the endpoints and the cluster of etcd://host:2379,host:2379/CLUSTER. Raises InvalidArgument."""
    scheme, _, rest = url.partition("://")
    hosts, _, cluster = rest.partition("/")
    if scheme != ETCD_SCHEME or not hosts or "://" in rest:
        raise InvalidArgument(f"{url}: write a list of members, or etcd://host:2379,host:2379/CLUSTER")
    return parse_endpoints(hosts), check_cluster(cluster)
