"""A real etcd for tests: it is started, killed and started again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.aggregator.cluster import etcd
from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.storage.base.errors import Refused, StoreError
from helpers.processes import free_port, until

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="the program etcd is missing (Debian: etcd-server)")


class EtcdProcess:
    """One etcd server on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.endpoint, self.peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self.endpoints = (self.endpoint,)
        self.peers = f"{self.name}={self.peer}"
        self.options: tuple[str, ...] = ()

    def start(self, wait: bool = True) -> None:
        """Start the server. wait: return only once it answers.

        Another test may use its port for a while, so that it ends at once. Then it is started again.
        """
        self._launch()
        if wait:
            until(self._answers_or_starts_again, f"{self.endpoint} answers")

    def _answers_or_starts_again(self) -> bool:
        if self.process.poll() is not None:
            self._launch()
        return self.answers()

    def _launch(self) -> None:
        command = [
            "etcd", "--name", self.name, "--data-dir", str(self.folder), "--initial-cluster", self.peers,
            "--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint,
            "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer, *self.options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers(self) -> bool:
        """Return whether the server answers, be it with a refusal."""
        try:
            EtcdClient(self.endpoints, 1.0).range("/")
        except Refused:
            return True
        except StoreError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def up(self, cluster: str = "lab") -> dict[str, bool]:
        """Return the known members of a cluster, and whether each is up."""
        return {m.name: m.is_up for m in etcd.list_members(self.endpoints, cluster)}


@pytest.fixture(name="server")
def running_etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """Yield a running etcd; a test module imports this fixture."""
    made = EtcdProcess(tmp_path / "etcd")
    try:
        made.start()
        yield made
    finally:
        made.kill()
