"""Every store keeps the contract of stores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.shared_memory import MemoryStore
from ckpt.storage.remote.fsspec_store import FsspecStore
from ckpt.storage.testing import StoreContract
from ckpt.storage.urls import open_store

pytest_plugins = ["helpers.moto_server"]


class TestLocalDirect(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "store")


class TestLocalBuffered(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "store", direct=False)


class TestLocalTmpfs(StoreContract):
    """A file system without a device and, before Linux 6.6, without O_DIRECT."""

    @pytest.fixture
    def store(self) -> Iterator[LocalStore]:
        if not os.path.isdir("/dev/shm"):
            pytest.skip("no tmpfs at /dev/shm")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield LocalStore(folder)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> MemoryStore:
        return MemoryStore(tmp_path / "store")


class TestObjectStore(StoreContract):
    @pytest.fixture
    def store(self, bucket: str):
        from ckpt.storage.remote.object_store import ObjectStore

        return ObjectStore(f"{bucket}/a run/folder")


class TestFsspecMemory(StoreContract):
    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[FsspecStore]:
        import fsspec

        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
        yield FsspecStore("memory://runs/one")
        fsspec.filesystem("memory").store.clear()


class TestFsspecLocal(StoreContract):
    """A file system that supports renames, through fsspec."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> FsspecStore:
        return FsspecStore(f"local://{tmp_path}/store")


class TestFsspecMemoryRoot(TestFsspecMemory):
    """The root of a file system, where paths have no folder."""

    @pytest.fixture
    def store(self) -> Iterator[FsspecStore]:
        import fsspec

        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]
        yield FsspecStore("memory://")
        fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("relative/path", "LocalStore"),
        ("/absolute/path", "LocalStore"),
        ("file:///absolute/path", "LocalStore"),
        ("memory://run", "FsspecStore"),
        ("s3://bucket/run", "ObjectStore"),
    ],
)
def test_a_url_selects_its_kind_of_store(url: str, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "ObjectStore":
        request.getfixturevalue("s3_endpoint")
    assert type(open_store(url)).__name__ == kind
