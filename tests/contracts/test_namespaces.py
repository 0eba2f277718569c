"""The contract of stores, on a namespace over directories and over nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nodes import LocalNode, directories, nodes_config

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.interfaces.store import NamespaceStore
from ckpt.storage.testing import StoreContract


def store_on(namespace: Namespace, root: str = "run") -> NamespaceStore:
    """Return a store on a namespace that a test has made."""
    store = NamespaceStore.__new__(NamespaceStore)
    store._namespace, store._root, store.url = namespace, root, f"{namespace.url}/{root}"
    return store


class TestOnDirectories(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[NamespaceStore]:
        namespace = Namespace(directories(tmp_path, 4))
        yield store_on(namespace)
        namespace.close()


class TestOnErasureCode(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[NamespaceStore]:
        namespace = Namespace(directories(tmp_path, 6, redundancy="4+2"))
        yield store_on(namespace)
        namespace.close()


class TestOnNodes(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[NamespaceStore]:
        nodes = [LocalNode(tmp_path / f"n{i}") for i in range(3)]
        namespace = Namespace(nodes_config(nodes))
        yield store_on(namespace)
        namespace.close()
        for node in nodes:
            node.close()
