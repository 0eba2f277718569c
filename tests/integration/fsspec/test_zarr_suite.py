"""The store test suite of zarr, on the namespace through fsspec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.nodes import three_nodes
from zarr.core.buffer import Buffer, cpu
from zarr.storage import FsspecStore
from zarr.testing.store import StoreTests

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem

_numbers = itertools.count()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three nodes, as written in a URL."""
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


class TestZarrStore(StoreTests[FsspecStore, cpu.Buffer]):
    store_cls = FsspecStore
    buffer_cls = cpu.Buffer

    # Of stores without an event loop; zarr's FsspecStore is none.
    test_get_sync = test_get_sync_missing = test_set_sync = test_delete_sync = test_delete_sync_missing = None

    @pytest.fixture
    def store_kwargs(self, address: str) -> dict[str, Any]:
        made = CkptFileSystem(members=address, asynchronous=True)
        return {"fs": made, "path": f"zarr{next(_numbers)}"}

    @pytest.fixture
    async def store(self, store_kwargs: dict[str, Any]) -> FsspecStore:
        return self.store_cls(**store_kwargs)

    async def get(self, store: FsspecStore, key: str) -> Buffer:
        namespace = store.fs.namespace
        return self.buffer_cls.from_bytes(namespace.get(f"{store.path}/{key}"))

    async def set(self, store: FsspecStore, key: str, value: Buffer) -> None:
        store.fs.namespace.put(f"{store.path}/{key}", value.to_bytes())

    def test_store_repr(self, store: FsspecStore) -> None:
        assert str(store).startswith("<FsspecStore(CkptFileSystem, zarr")

    def test_store_supports_writes(self, store: FsspecStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: FsspecStore) -> None:
        assert store.supports_listing
