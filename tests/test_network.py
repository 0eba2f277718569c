"""Nodes and clients on hosts of their own, with wires between them that are cut: network namespaces and blackhole routes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt.aggregator import repair as repairs
from ckpt.aggregator.members import from_table
from ckpt.aggregator.namespace import Namespace

BRIDGE = f"ckpt{os.getpid() % 100_000}"


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class Hosts:
    """Hosts on one wire, 10.97.0.1 and so on; this process is 10.97.0.254."""

    def __init__(self, count: int) -> None:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", "10.97.0.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        self.names = [f"{BRIDGE}-{i}" for i in range(count)]
        self._running: list[subprocess.Popen[str]] = []
        for i, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", f"{BRIDGE}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{BRIDGE}v{i}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def address(self, host: int) -> str:
        return f"10.97.0.{host + 1}"

    def run(self, host: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        every = ["ip", "netns", "exec", self.names[host], *command]
        self._running.append(subprocess.Popen(every, text=True, **options))
        return self._running[-1]

    def cut(self, one: int, other: int) -> None:
        """What the two send each other is lost without a word."""
        ip("-n", self.names[one], "route", "add", "blackhole", f"{self.address(other)}/32")
        ip("-n", self.names[other], "route", "add", "blackhole", f"{self.address(one)}/32")

    def mend(self, one: int, other: int) -> None:
        ip("-n", self.names[one], "route", "del", "blackhole", f"{self.address(other)}/32")
        ip("-n", self.names[other], "route", "del", "blackhole", f"{self.address(one)}/32")

    def close(self) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for name in self.names:
            ip("netns", "del", name, check=False)
        ip("link", "del", BRIDGE, check=False)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or ip("netns", "add", f"{BRIDGE}-try", check=False).returncode:
        pytest.skip("no network namespaces here: they need iproute2 and root")
    ip("netns", "del", f"{BRIDGE}-try")
    made: Hosts | None = None
    try:
        made = Hosts(6)
    except subprocess.CalledProcessError as error:
        ip("link", "del", BRIDGE, check=False)
        pytest.skip(f"no bridges between network namespaces here: {error.stderr}")
    yield made
    made.close()


CLIENT = """
import json, sys
from ckpt.aggregator.members import from_table
from ckpt.aggregator.namespace import Namespace
from ckpt.storage.errors import AlreadyExists
from ckpt.storage.testing import pattern
me, members = sys.argv[1], json.loads(sys.argv[2])
namespace = Namespace(from_table("test", {"members": members, "redundancy": "2x", "deadline_seconds": 2.0}, "the test"))
namespace.slow_seconds, namespace.hedge_seconds = 1.0, 0.2
won = []
for i in range(int(sys.argv[3])):
    namespace.put(f"{me}/{i}", pattern(100_000 + i, i))
    try:
        namespace.put(f"both/{i}", f"{me} {i}".encode(), new=True)
        won.append(i)
    except AlreadyExists:
        pass
    assert namespace.get(f"{me}/{i}") == pattern(100_000 + i, i)
    assert namespace.get(f"both/{i}").endswith(str(i).encode())
print(json.dumps(won), flush=True)
"""


def test_each_client_reaches_other_nodes(hosts: Hosts, tmp_path: Path) -> None:
    """Four nodes; one client does not reach the first, the other not the last. Both write, to the same names too: each name has
    one winner, both see it, and all is there when the wires are mended."""
    members = []
    for i in range(4):
        address = f"{hosts.address(i)}:7070"
        node = hosts.run(
            i, sys.executable, "-m", "ckpt.tools.node", "--data", str(tmp_path / f"n{i}"), "--listen", address,
            "--insecure", "--monitor", "127.0.0.1:0", stderr=subprocess.PIPE,
        )  # fmt: skip
        assert node.stderr is not None
        assert any("serving" in line for line in node.stderr), "the node started"
        members.append(address)
    table = {"members": members, "redundancy": "2x", "deadline_seconds": 5.0}
    here = Namespace(from_table("test", table, "the test"))
    here.put("before", b"made while all answered")
    hosts.cut(4, 0)
    hosts.cut(5, 3)
    count = 12
    clients = [
        hosts.run(4 + i, sys.executable, "-c", CLIENT, f"c{i}", json.dumps(members), str(count), stdout=subprocess.PIPE)
        for i in range(2)
    ]
    won = []
    for client in clients:
        out, _ = client.communicate(timeout=240)
        assert client.returncode == 0
        won.append(set(json.loads(out)))
    assert won[0] | won[1] == set(range(count))
    assert not won[0] & won[1], "each name has one winner"
    for who in range(2):
        for i in won[who]:
            assert here.get(f"both/{i}") == f"c{who} {i}".encode()
    hosts.mend(4, 0)
    hosts.mend(5, 3)
    repairs.repair(here, repairs.survey(here))
    found = repairs.survey(here, verify=True)
    assert found.whole, found
    assert found.files == 3 * count + 1
    here.close()
