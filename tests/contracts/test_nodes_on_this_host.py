"""The contract of stores, between a client and a node on one host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nodes import LocalNode

from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.node.server import NodeOptions
from ckpt.storage.testing import StoreContract

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets of abstract names are Linux's")


class TestOverTheWire(StoreContract):
    """The contract without descriptor passing; contracts/test_nodes.py has it with descriptor passing."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[NodeStore]:
        made = LocalNode(tmp_path / "node", NodeOptions(pass_descriptors=False))
        store = NodeStore(made.address, NodeCredentials(deadline_seconds=20))
        yield store
        store.close()
        made.close()
