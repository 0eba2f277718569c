"""Messages of which a byte changes between client and node, as without TLS: they count as not received."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow.flight as flight
import pytest
from helpers.node_fixtures import local_node as local_node
from helpers.nodes import Link, LocalNode

from ckpt.storage.base.errors import Unavailable
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DirectChange, Register, RegisterValue

GOOD, BAD = b"value-of-0", b"value-of-1"
BALLOT = Ballot(5, "me")


@pytest.fixture
def link(local_node: LocalNode) -> Iterator[Link]:
    """Yield a proxy before the node in this process."""
    made = Link(local_node.address)
    yield made
    made.close()


@pytest.fixture
def client(link: Link) -> Iterator[NodeStore]:
    """Yield a client of the node, through the proxy."""
    made = NodeStore(link.address, NodeCredentials(deadline_seconds=100))
    made.registers.mark_complete()
    yield made
    made.close()


def accept(client: NodeStore) -> object:
    return client.registers.accept([("/a", RegisterValue(b"head", GOOD))], BALLOT)


def change(client: NodeStore) -> object:
    return client.registers.change([DirectChange("/a", NO_BALLOT, RegisterValue(b"head", GOOD))], "me")


def learn(client: NodeStore) -> object:
    return client.registers.learn("/a", RegisterValue(b"head", GOOD))


def put(client: NodeStore) -> object:
    return client.put("a", GOOD)


@pytest.mark.parametrize("call", [accept, change, learn, put])
def test_a_changed_request_is_refused_and_changes_nothing(
    local_node: LocalNode, link: Link, client: NodeStore, call: Callable[[NodeStore], object]
) -> None:
    link.changed_requests = GOOD, BAD
    with pytest.raises(Unavailable, match="changed on its way"):
        call(client)
    direct = NodeStore(local_node.address, NodeCredentials())
    assert direct.registers.read(["/a"]) == [Register()]
    assert not direct.exists("a")
    direct.close()

    link.changed_requests = b"", b""
    call(client)


def read(client: NodeStore) -> object:
    return client.registers.read(["/a"])


def scan(client: NodeStore) -> object:
    return list(client.registers.scan("/"))


def list_objects(client: NodeStore) -> object:
    return [entry.name for entry in client.list()]


def inventory(client: NodeStore) -> object:
    return sorted(client.inventory_part().objects)


@pytest.mark.parametrize("call", [read, scan, list_objects, inventory])
def test_a_changed_answer_is_no_answer(link: Link, client: NodeStore, call: Callable[[NodeStore], object]) -> None:
    client.registers.accept([("/a", RegisterValue(GOOD, GOOD))], BALLOT)
    client.put(f"folder/{GOOD.decode()}", b"1")
    answer = call(client)

    link.changed_answers = GOOD, BAD
    with pytest.raises(Unavailable, match="changed on its way"):
        call(client)

    link.changed_answers = b"", b""
    assert call(client) == answer


def test_a_changed_request_for_bytes_is_refused(link: Link, client: NodeStore) -> None:
    client.put(GOOD.decode(), b"1")
    client.put(BAD.decode(), b"2")
    link.changed_requests = GOOD, BAD
    with pytest.raises(Unavailable, match="changed on its way"):
        list(client.read(GOOD.decode(), 0, 1))


def test_an_append_whose_position_has_changed_is_not_acknowledged(link: Link, client: NodeStore) -> None:
    key = client.call("create", "a", 0)
    assert client.append(key, memoryview(b"1")) == 0
    link.changed_answers = wire.pack(4096), wire.pack(8192)
    with pytest.raises(Unavailable, match="changed on its way"):
        client.append(key, memoryview(b"1"))


def test_a_client_without_digests_gets_an_answer_without_one(client: NodeStore) -> None:
    """Clients of earlier versions send no digests."""
    action = flight.Action("exists", wire.pack(["a"]))
    answers = [bytes(result.body) for result in client.next_connection().do_action(action, client.call_options())]
    assert answers == [wire.pack(False)]
