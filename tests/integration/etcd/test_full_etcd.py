"""The commands of the page on disaster recovery free the space of a full etcd."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.docs_pages import DOCS, blocks, commands, masked, matches
from helpers.etcd_server import EtcdProcess, needs_etcd

from ckpt.aggregator.cluster.etcd_client import EtcdClient
from ckpt.storage.base.errors import Unavailable

PAGE = DOCS / "operations/disaster-recovery.md"


@needs_etcd
@pytest.mark.skipif(shutil.which("etcdctl") is None, reason="the program etcdctl is missing (Debian: etcd-client)")
def test_the_commands_free_the_space_of_a_full_etcd(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(PAGE) if "etcdctl" in block.text]
    server = EtcdProcess(tmp_path / "etcd")
    server.options = ("--quota-backend-bytes", "4000000")
    try:
        server.start()
        client = EtcdClient(server.endpoints, 300)
        with pytest.raises(Unavailable, match="etcd is full"):
            while True:
                client.put("/full", b"x" * 500_000)
        script = "\n".join(command for command, _ in commands(block.text))
        environment = os.environ | {"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": server.endpoint}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=True)
        client.put("/full", b"x" * 500_000)
    finally:
        server.kill()
    shown = "\n".join(output for _, output in commands(block.text) if output)
    assert matches(masked(shown, block.varies), masked(done.stdout, block.varies)), done.stdout
