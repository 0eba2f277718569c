"""A namespace as an fsspec filesystem."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem
from helpers.nodes import three_nodes


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the addresses of three nodes, as a URL contains them."""
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


@pytest.fixture
def filesystem(address: str) -> Iterator[CkptFileSystem]:
    """Yield a filesystem that is emptied after each test."""
    made = fsspec.filesystem("ckpt", members=address)
    yield made
    made.namespace.delete(list(made.namespace.list()))
