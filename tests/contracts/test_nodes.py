"""The contract of stores, on a node over its wire protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nodes import LocalNode

from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials
from ckpt.storage.testing import StoreContract


class TestNodeStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[NodeStore]:
        made = LocalNode(tmp_path / "node")
        store = NodeStore(made.address, NodeCredentials(deadline_seconds=20))
        yield store
        store.close()
        made.close()
