"""A storage node in this process, and its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.credentials import NodeCredentials
from helpers.nodes import LocalNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    """Yield a node in this process."""
    made = LocalNode(tmp_path / "node")
    yield made
    made.close()


@pytest.fixture
def store(node: LocalNode) -> Iterator[NodeStore]:
    """Yield a client of the node."""
    made = NodeStore(node.address, NodeCredentials(deadline_seconds=10))
    yield made
    made.close()
