"""A store over fsspec: what it promises beyond the contract of stores."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from ckpt.storage.base.errors import AlreadyExists, NotFound, StoreError, Unavailable, UnknownScheme, is_damage
from ckpt.storage.remote.fsspec_store import FsspecStore
from ckpt.storage.testing import StoreContract, object_lengths, run_simultaneously, write_object
from ckpt.storage.urls import open_store


class PickyFileSystem(LocalFileSystem):
    """Like an FTP server: it renames only to a free name, and has no exclusive create."""

    protocol = "picky"
    cachable = False

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise RuntimeError("553 the target exists")
        super().mv(path1, path2)

    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
        super().pipe_file(path, value)


@pytest.fixture
def picky() -> Iterator[None]:
    """Register PickyFileSystem as scheme `picky`."""
    fsspec.register_implementation("picky", PickyFileSystem, clobber=True)
    yield
    _registry.pop("picky")


class TestPicky(StoreContract):
    @pytest.fixture
    def store(self, picky: None, tmp_path: Path) -> FsspecStore:
        return FsspecStore(f"picky://{tmp_path}/store")

    def test_readers_see_one_version_of_a_replaced_object(self, store: Any) -> None:
        """A server that renames only to a free name leaves a moment without the object, but no reader sees parts of two."""
        versions = [bytes([i]) * 50_000 for i in range(8)]
        store.put("a", versions[0])

        def replace_all() -> None:
            for version in versions:
                store.put("a", version)

        replaced, *seen = run_simultaneously([replace_all, *[lambda: store.get("a")] * 6])
        assert replaced is None
        assert [data for data in seen if not isinstance(data, NotFound) and data not in versions] == []
        assert store.get("a") == versions[-1]


def test_an_unknown_scheme_lists_the_possible_ones() -> None:
    with pytest.raises(UnknownScheme, match=r"nonsense://.*s3://.*ckpt-store\[s3\].*another scheme of fsspec") as failure:
        open_store("nonsense://host/run")
    assert "\n" not in str(failure.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smbprotocol", None)
    monkeypatch.setitem(sys.modules, "smbclient", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.smb", raising=False)
    with pytest.raises(UnknownScheme, match=r"smb://.*smbprotocol"):
        open_store("smb://host/run")


def test_a_sweep_removes_temporary_files_of_a_killed_writer(tmp_path: Path) -> None:
    store = FsspecStore(f"local://{tmp_path}")
    store.put("a/b", b"x")
    writer = store.create("a/c")
    writer.append(memoryview(b"x"))
    assert len(os.listdir(tmp_path / "a")) == 2
    store.sweep_temporaries("a")
    assert os.listdir(tmp_path / "a") == ["b"]
    writer.abort()


def test_a_rename_that_fails_keeps_the_previous_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server fails the first one, two, … renames, and answers all else: an object is old or new, and never missing."""
    store, rename = FsspecStore(f"local://{tmp_path}"), LocalFileSystem.mv
    left: list[int] = []

    def fail_first(self: Any, source: str, target: str) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise TimeoutError("no answer in time")
        rename(self, source, target)

    monkeypatch.setattr(LocalFileSystem, "mv", fail_first)
    for write in (store.put, lambda name, data: write_object(store, name, data)):
        for failures in range(4):
            left[:] = [0]
            store.put("a", b"old")
            left[:] = [failures]
            try:
                write("a", b"new")
            except StoreError:
                assert store.get("a") == b"old"
            else:
                assert store.get("a") == b"new"
            assert os.listdir(tmp_path) == ["a"]


def test_a_rename_to_a_name_that_was_cleared_and_that_fails_gives_the_object_back(
    picky: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rename = FsspecStore(f"picky://{tmp_path}"), PickyFileSystem.mv
    store.put("a", b"old")

    def fail_to_free_name(self: Any, source: str, target: str) -> None:
        if target.endswith("/a") and not self.exists(target) and self.cat_file(source) == b"new":
            raise TimeoutError("no answer in time")
        rename(self, source, target)

    monkeypatch.setattr(PickyFileSystem, "mv", fail_to_free_name)
    with pytest.raises(StoreError, match="no answer in time"):
        store.put("a", b"new")
    assert store.get("a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(f"local://{tmp_path}")

    def refuse(self: Any, source: str, target: str) -> None:
        raise RuntimeError("refused by the test")

    monkeypatch.setattr(LocalFileSystem, "mv", refuse)
    with pytest.raises(StoreError, match="refused by the test"):
        store.put("a", b"x")
    with pytest.raises(StoreError, match="refused by the test"):
        write_object(store, "a", b"x")
    assert os.listdir(tmp_path) == []


def test_a_listing_cache_hides_no_change_of_another_store(tmp_path: Path) -> None:
    """Two stores over one directory, as two processes have them."""
    one, two = FsspecStore(f"local://{tmp_path}"), FsspecStore(f"local://{tmp_path}")
    assert object_lengths(two) == {}
    one.put("a", b"x")
    assert object_lengths(two) == {"a": 1}
    one.put("a", b"longer")
    assert two.get("a") == b"longer"


def test_an_input_output_error_of_a_service_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of fsspec raise EIO for errors of a service that have no other number, and no disk of this host is bad."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the service has failed")

    store = FsspecStore(f"local://{tmp_path}")
    store.put("a", b"bytes")
    for method in ("open", "cat_file"):
        monkeypatch.setattr(LocalFileSystem, method, fail)
    for read in (lambda: store.get("a"), lambda: store.open("a").read_into(0, memoryview(bytearray(5)))):
        with pytest.raises(Unavailable, match="the service has failed") as error:
            read()
        assert not is_damage(error.value)


def test_a_new_object_replaces_none_that_a_failed_lookup_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `exists` of fsspec is False after any error."""

    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("no answer in time")

    store = FsspecStore(f"local://{tmp_path}")
    store.put_new("a", b"first")
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="no answer in time"):
        patch.setattr(LocalFileSystem, "info", fail)
        store.put_new("a", b"second")
    assert store.get("a") == b"first"
    with pytest.raises(AlreadyExists):
        store.put_new("a", b"second")
    store.put_new("a2", b"second")


def test_a_server_that_sends_whole_files_for_ranges_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m http.server` does, through the HTTP file system of fsspec."""
    store, read_all = FsspecStore(f"local://{tmp_path}"), LocalFileSystem.cat_file
    store.put("a", bytes(range(100)))
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda self, path, start=None, end=None: read_all(self, path))
    for position in (0, 10):
        with pytest.raises(StoreError, match="sent 100 bytes where 7 were requested") as raised:
            store.open("a").read_into(position, memoryview(bytearray(7)))
        assert not is_damage(raised.value)
    assert store.get("a") == bytes(range(100))
