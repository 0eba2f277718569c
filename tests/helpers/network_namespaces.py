"""Several hosts on one machine: network namespaces on a bridge; blackhole routes interrupt the network between them."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

BRIDGE = f"ckpt{secrets.token_hex(3)}"
"""The name of the bridge; each process has another one, as interfaces of a killed process stay."""


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Return the result of an `ip` command."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


class Hosts:
    """Hosts on one network: if it is 10.97.5, they are 10.97.5.1 and so on; this process is 10.97.5.254."""

    def __init__(self, count: int, network: str) -> None:
        self.network = network
        self.here = f"{network}.254"
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{self.here}/24", "dev", BRIDGE)
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
        return f"{self.network}.{host + 1}"

    def run(self, host: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        self._running.append(subprocess.Popen([*self._enter(host), *command], text=True, **options))
        return self._running[-1]

    def _enter(self, host: int) -> list[str]:
        """Return the start of a command that runs on a host.

        `ip netns exec` shows the files of /etc/netns/NAME, and so it copies all mounts. A FUSE mount of another test does not
        end as long as such a copy exists.
        """
        name = self.names[host]
        if os.path.exists(f"/etc/netns/{name}"):
            return ["ip", "netns", "exec", name]
        return ["nsenter", f"--net=/run/netns/{name}"]

    def run_etcd(self, host: int, folder: Path) -> subprocess.Popen[str]:
        """Start an etcd on a host; once it answers, it serves clients on `etcd_at(host)`."""
        client, peer = f"http://{self.etcd_at(host)}", f"http://{self.address(host)}:2380"
        return self.run(
            host, "etcd", "--name", "e", "--data-dir", str(folder), "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"e={peer}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def etcd_at(self, host: int) -> str:
        """Return HOST:PORT of the etcd on a host."""
        return f"{self.address(host)}:2379"

    def unplug(self, host: int) -> None:
        """Disconnect a host from all others, in both directions."""
        ip("link", "set", f"{BRIDGE}v{host}", "down")

    def plug(self, host: int) -> None:
        """Connect a host again."""
        ip("link", "set", f"{BRIDGE}v{host}", "up")

    def processes(self, host: int) -> list[int]:
        """Return the processes that run on a host."""
        return [int(pid) for pid in ip("netns", "pids", self.names[host], check=False).stdout.split()]

    def cut(self, one: int, other: int) -> None:
        """Lose all packets between two hosts silently."""
        ip("-n", self.names[one], "route", "add", "blackhole", f"{self.address(other)}/32")
        ip("-n", self.names[other], "route", "add", "blackhole", f"{self.address(one)}/32")

    def mend(self, one: int, other: int) -> None:
        """Undo `cut`."""
        ip("-n", self.names[one], "route", "del", "blackhole", f"{self.address(other)}/32")
        ip("-n", self.names[other], "route", "del", "blackhole", f"{self.address(one)}/32")

    def close(self) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for host in range(len(self.names)):
            self._end_all(host)
        remove(len(self.names))

    def _end_all(self, host: int) -> None:
        """Kill the descendants of the processes, as they keep the network namespace and its interface in existence."""
        deadline = time.monotonic() + 10
        while (left := self.processes(host)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def remove(count: int) -> None:
    """Remove the interfaces of this number of hosts, too: if only the namespace is removed, the kernel removes them late."""
    for i in range(count):
        ip("link", "del", f"{BRIDGE}v{i}", check=False)
        ip("netns", "del", f"{BRIDGE}-{i}", check=False)
    ip("link", "del", BRIDGE, check=False)


@contextmanager
def free_network() -> Iterator[str]:
    """Yield a network that no other test process uses or has left over; otherwise packets could take the wrong bridge."""
    used = ip("-4", "route", "show", "table", "all", check=False).stdout
    for number in range(1, 255):
        if f"10.97.{number}." in used:
            continue
        with (Path(tempfile.gettempdir()) / f"ckpt-network-{number}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield f"10.97.{number}"
            return
    pytest.skip("all networks for tests are in use")


@contextmanager
def hosts_on_a_wire(count: int) -> Iterator[Hosts]:
    """Yield this number of hosts, or skip the test where network namespaces are impossible."""
    if shutil.which("ip") is None or ip("netns", "add", f"{BRIDGE}-try", check=False).returncode:
        pytest.skip("network namespaces are not available: they need iproute2 and root")
    ip("netns", "del", f"{BRIDGE}-try")
    with free_network() as network:
        try:
            made = Hosts(count, network)
        except subprocess.CalledProcessError as error:
            remove(count)
            pytest.skip(f"bridges between network namespaces are not available: {error.stderr}")
        try:
            yield made
        finally:
            made.close()
