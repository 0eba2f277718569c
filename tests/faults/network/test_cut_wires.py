"""Nodes and clients in network namespaces, with connections between them that are cut."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.network_namespaces import Hosts, hosts_on_a_wire

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_on_a_wire(6) as made:
        yield made


CLIENT = """
import json, sys
from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import AlreadyExists
from ckpt.storage.testing import random_bytes
me, members = sys.argv[1], json.loads(sys.argv[2])
namespace = Namespace(config_from_table("test", {"members": members, "redundancy": "2x", "deadline_seconds": 2.0}, "the test"))
namespace.member_io.append_timeout_seconds, namespace.member_io.hedge_after_seconds = 1.0, 0.2
won = []
for i in range(int(sys.argv[3])):
    namespace.put(f"{me}/{i}", random_bytes(100_000 + i, i))
    try:
        namespace.put(f"both/{i}", f"{me} {i}".encode(), new=True)
        won.append(i)
    except AlreadyExists:
        pass
    assert namespace.get(f"{me}/{i}") == random_bytes(100_000 + i, i)
    assert namespace.get(f"both/{i}").endswith(str(i).encode())
print(json.dumps(won), flush=True)
"""


def test_clients_that_reach_different_hosts_agree(hosts: Hosts, tmp_path: Path) -> None:
    """There are four nodes; one client does not reach the first, the other not the last. Both write, also to the same names:
    each name has one winner, both clients see it, and all files exist when the connections are mended."""
    members = []
    for i in range(4):
        address = f"{hosts.address(i)}:7070"
        node = hosts.run(
            i, sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / f"n{i}"), "--listen", address,
            "--insecure", "--monitor", "127.0.0.1:0", stderr=subprocess.PIPE,
        )  # fmt: skip
        assert node.stderr is not None
        assert any("serving" in line for line in node.stderr), "the node did not start"
        members.append(address)
    table = {"members": members, "redundancy": "2x", "deadline_seconds": 5.0}
    namespace = Namespace(config_from_table("test", table, "the test"))
    namespace.put("before", b"written while all nodes answer")
    hosts.cut(4, 0)
    hosts.cut(5, 3)
    count = 12
    clients = [
        hosts.run(4 + i, sys.executable, "-c", CLIENT, f"c{i}", json.dumps(members), str(count), stdout=subprocess.PIPE)
        for i in range(2)
    ]
    won = []
    for client in clients:
        out, _ = client.communicate(timeout=600)
        assert client.returncode == 0
        won.append(set(json.loads(out)))
    assert won[0] | won[1] == set(range(count))
    assert not won[0] & won[1], "a name has two winners"
    for client_number in range(2):
        for i in won[client_number]:
            assert namespace.get(f"both/{i}") == f"c{client_number} {i}".encode()
    hosts.mend(4, 0)
    hosts.mend(5, 3)
    repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
    found = scrub.scrub_namespace(namespace, verify=True)
    assert found.is_whole, found
    assert found.files == 3 * count + 1
    namespace.close()
