"""A namespace whose connections are cut, slow, or carry garbage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.namespace_files import NEW, OLD
from helpers.nodes import Link, LocalNode, garbage, quick

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import AlreadyExists, StoreError, Unavailable
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import random_bytes


@pytest.fixture
def nodes_and_links(tmp_path: Path) -> Iterator[tuple[list[LocalNode], list[list[Link]]]]:
    """Three nodes, and one connection from each of two clients to each of them, which all bytes take."""
    nodes = [LocalNode(tmp_path / f"n{i}", NodeOptions(pass_descriptors=False)) for i in range(3)]
    links = [[Link(node.address) for node in nodes] for _ in range(2)]
    yield nodes, links
    for link in itertools.chain(*links):
        link.close()
    for node in nodes:
        node.close()


def open_through(links: list[Link]) -> Namespace:
    """Return a client that uses these connections; the members have the same names for all clients."""
    members = [{"url": link.address, "name": f"n{i}"} for i, link in enumerate(links)]
    config = config_from_table("test", {"members": members, "redundancy": "1x", "deadline_seconds": 2.0}, "the test")
    return quick(config)


@pytest.mark.parametrize("how", ["severed", "held"])
def test_clients_that_reach_different_nodes_agree(nodes_and_links: tuple[list[LocalNode], list[list[Link]]], how: str) -> None:
    """One client does not reach the first node, the other not the last: both continue, and agree on every result."""
    _, links = nodes_and_links
    clients = [open_through(each) for each in links]
    clients[0].put("a", b"0")
    for link in (links[0][0], links[1][2]):
        link.sever() if how == "severed" else link.hold(True)
    for i in range(4):
        outcomes: list[str] = []
        for number, client in enumerate(clients):
            try:
                client.put(f"race{i}", f"{number}".encode(), new=True)
                outcomes.append("won")
            except AlreadyExists:
                outcomes.append("lost")
        assert sorted(outcomes) == ["lost", "won"]
        assert {client.get(f"race{i}") for client in clients} == {str(outcomes.index("won")).encode()}
    clients[0].put("a", b"1")
    assert clients[1].get("a") == b"1"
    clients[1].delete(["a"])
    assert clients[0].stat("a") is None
    assert clients[0].list() == clients[1].list()
    for client in clients:
        client.close()


def test_a_client_without_a_quorum_reports_unavailable_members(
    nodes_and_links: tuple[list[LocalNode], list[list[Link]]],
) -> None:
    _, links = nodes_and_links
    client = open_through(links[0])
    client.put("a", b"1")
    for link in links[0][:2]:
        link.sever()
    for call in (lambda: client.put("a", b"2"), lambda: client.get("a"), client.list):
        with pytest.raises(Unavailable, match="start"):
            call()
    # A failed write may have reached a member: later readers all see it, or none does.
    found = open_through(links[1]).get("a")
    assert found in (b"1", b"2")
    assert {open_through(links[1]).get("a") for _ in range(3)} == {found}
    client.close()


def test_reads_take_another_copy_than_that_of_a_slow_node(
    nodes_and_links: tuple[list[LocalNode], list[list[Link]]], tmp_path: Path
) -> None:
    """The reply of another copy arrives before that of the slow node."""
    _, links = nodes_and_links
    members = [{"url": link.address, "name": f"n{i}"} for i, link in enumerate(links[0])]
    client = quick(config_from_table("test", {"members": members, "redundancy": "3x", "deadline_seconds": 120.0}, "the test"))
    data = random_bytes(3_000_000)
    client.put("a", data)
    file = client.stat("a")
    assert file is not None
    assert file.layout is not None
    (stripe,) = file.layout.stripes
    assert stripe.fragments[0] is not None
    first = file.layout.objects[stripe.fragments[0].object_index].member  # the reader asks it first
    got = bytearray(len(data))
    with client.open("a") as reader:  # the record is cached, so no earlier call has measured the slow member
        links[0][int(first.removeprefix("n"))].seconds = 2.0  # per 64 KiB: 90 seconds for the whole file
        began = time.monotonic()
        reader.read_into(0, memoryview(got))
        assert time.monotonic() - began < 60, "the read waited for the slow member"
    assert got == data
    for _ in range(3):
        assert client.get("a") == data
    assert time.monotonic() - began < 80
    client.close()


def test_a_member_that_sends_garbage_is_skipped_and_named(tmp_path: Path) -> None:
    """Reads and writes use the other members, and a direct call raises an error with the address of the broken one."""
    nodes = [LocalNode(tmp_path / f"n{i}") for i in range(3)]
    address, listener = garbage()
    members = [{"url": node.address, "name": f"n{i}"} for i, node in enumerate(nodes)]
    table: dict[str, Any] = {"members": members, "redundancy": "2x", "deadline_seconds": 2.0}
    first = Namespace(config_from_table("test", table, "the test"))
    first.put("a", OLD)
    broken = quick(config_from_table("test", {**table, "members": [{"url": address, "name": "n0"}, *members[1:]]}, "the test"))
    assert broken.get("a") == OLD
    broken.put("b", NEW)
    assert first.get("b") == NEW
    with pytest.raises(StoreError, match=address):
        broken.open_members["n0"].info()
    listener.close()
    for each in (first, broken, *nodes):
        each.close()
