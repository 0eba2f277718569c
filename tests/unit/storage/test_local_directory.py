"""A local directory as a store: what it promises beyond the contract of stores."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.local_stores import failpoints as failpoints
from helpers.local_stores import files_below
from helpers.local_stores import store as store
from helpers.page_cache import bypasses_cache, drop_cache, is_cached

from ckpt.storage.base import call_timeout
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import O_DIRECT
from ckpt.storage.testing import object_lengths, random_bytes, write_object
from ckpt.storage.urls import open_store


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_open_once_bypasses_the_page_cache(store: LocalStore) -> None:
    """Pages that are in the cache already are read from it."""
    data = random_bytes(9 << 20)
    file = Path(store.root) / "b"
    file.write_bytes(data)
    memory = memoryview(map_huge_pages(8 << 20))
    drop_cache(file)
    if is_cached(file, 8 << 20):
        pytest.skip("this file system is entirely in memory")

    def read() -> None:
        with store.open_once("b") as reader:
            assert reader.read_into(1 << 20, memory) == len(memory)
            assert memory == data[1 << 20 :]

    assert bypasses_cache([file], read, lambda: is_cached(file, 4 << 20))
    with store.open("b") as reader:
        assert reader.read_into(0, memory) == len(memory)
        assert is_cached(file, 6 << 20)
    memory[:] = bytes(len(memory))
    with store.open_once("b") as reader:
        assert reader.read_into(0, memory) == len(memory)
        assert memory == data[: 8 << 20]


def test_bytes_of_the_page_cache_are_copied_without_a_read_of_the_disk(store: LocalStore) -> None:
    data = random_bytes(4 << 20)
    file = Path(store.root) / "b"
    file.write_bytes(data)
    buffer = bytearray(1 << 20)
    with store.open_once("b") as reader:
        assert reader.read_cached(1 << 20, memoryview(buffer)) == len(buffer)
        assert buffer == data[1 << 20 : 2 << 20]
        assert reader.read_cached((4 << 20) - 10, memoryview(buffer)) == 10
        drop_cache(file)
        if is_cached(file, 0):
            pytest.skip("this file system is entirely in memory")
        assert reader.read_cached(2 << 20, memoryview(buffer)) == 0


def test_a_prefetch_reads_only_its_range_into_the_page_cache(store: LocalStore) -> None:
    file = Path(store.root) / "b"
    file.write_bytes(random_bytes(9 << 20))
    drop_cache(file)
    if is_cached(file, 0):
        pytest.skip("this file system is entirely in memory")
    store.prefetch("b", 3 << 20, 4 << 20)
    while not all(is_cached(file, position << 20) for position in (4, 5, 6)):
        time.sleep(0.01)
    assert not is_cached(file, 3 << 20)
    assert not is_cached(file, 8 << 20)


def test_a_sweep_removes_only_temporary_files_of_its_folder(store: LocalStore) -> None:
    existing = {"a/.x.0.ckpt-tmp", "b/.x.0.ckpt-tmp", "b/.hidden", "b/x.ckpt-tmp"}
    for name in existing:
        path = Path(store.root, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    store.sweep_temporaries("b")
    assert files_below(store) == {"a/kept", "a/.x.0.ckpt-tmp", "b/.hidden", "b/x.ckpt-tmp"}


def test_a_sweep_without_folders_removes_only_temporary_files_beside_them(store: LocalStore) -> None:
    for name in (".x.0.ckpt-tmp", "b/.x.0.ckpt-tmp"):
        path = Path(store.root, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    Path(store.root, "empty").mkdir()
    store.sweep_temporaries("", folders=False)
    assert files_below(store) == {"a/kept", "b/.x.0.ckpt-tmp"}
    assert Path(store.root, "empty").is_dir()


def test_symbolic_links_are_listed_as_targets_and_replaced_themselves(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(b"outside")
    for name, target in {"file": "file", "folder": "folder", "dangling": "none"}.items():
        os.symlink(outside / target, Path(store.root, "a", name))
    assert sorted(store.list_folders("a")) == ["dangling", "folder"]
    with pytest.raises(StoreError, match="a/dangling is a symbolic link to .*/outside/none, which does not exist: mount its"):
        object_lengths(store)
    store.put("a/file", b"inside")
    write_object(store, "a/dangling", b"inside")
    assert (outside / "file").read_bytes() == b"outside"
    assert not (outside / "none").exists()
    assert object_lengths(store) == {"a/kept": 4, "a/file": 6, "a/dangling": 6}
    os.symlink(outside / "file", Path(store.root, "a", "again"))
    assert object_lengths(store) == {"a/kept": 4, "a/file": 6, "a/dangling": 6, "a/again": 7}
    store.delete(["a/again"])
    assert (outside / "file").exists()


def test_foreign_files_are_left_alone(store: LocalStore) -> None:
    for name in ("lost+found", "ü.bin", "with space", ".hidden"):
        Path(store.root, name).write_bytes(b"")
        Path(store.root, "a", name).write_bytes(b"")
        Path(store.root, "a", "folder " + name).mkdir()
    assert object_lengths(store) == {"a/kept": 4}
    assert list(store.list_folders()) == ["a"]
    assert list(store.list_folders("a")) == []


@pytest.mark.parametrize("folder", ["größe 模型", "a b", "100%25", "q?x=1#y"])
def test_any_path_can_be_a_root_and_is_found_by_its_url(tmp_path: Path, folder: str) -> None:
    store = LocalStore(tmp_path / folder)
    store.put("a", b"x")
    assert (tmp_path / folder / "a").read_bytes() == b"x"
    again = open_store(store.url)
    assert isinstance(again, LocalStore)
    assert again.root == store.root
    assert again.get("a") == b"x"


def test_delete_removes_empty_folders_up_to_the_root(store: LocalStore) -> None:
    store.put("x/y/z", b"")
    store.delete(["x/y/z"])
    assert sorted(os.listdir(store.root)) == ["a"]
    store.delete(["a/kept"])
    assert os.listdir(store.root) == []


def test_a_put_succeeds_when_its_object_is_deleted_at_once(store: LocalStore, failpoints: Callable[[str], None]) -> None:
    """A reader that waited for the object has read and deleted it, with its folder, before the put returns."""
    failpoints("local.put=sleep:1")
    thread = threading.Thread(target=lambda: failed.extend(raised(lambda: store.put("part/1", b"one"))))
    failed: list[BaseException] = []
    thread.start()
    path = Path(store.root) / "part" / "1"
    while thread.is_alive() and not path.exists():
        time.sleep(0.001)
    assert store.get("part/1") == b"one"
    shutil.rmtree(path.parent)
    thread.join()
    assert failed == []


def raised(call: Callable[[], None]) -> list[BaseException]:
    """Return the StoreError of a call, or an empty list."""
    try:
        call()
    except StoreError as error:
        return [error]
    return []


def test_a_disk_gets_fewer_parallel_appends_than_other_file_systems(tmp_path: Path) -> None:
    """A network file system and one in memory have no device of their own."""
    store = LocalStore(tmp_path / "not" / "yet" / "made")
    assert store.parallel_appends == (4 if os.major(tmp_path.stat().st_dev) else 8)
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    assert LocalStore("/dev/shm/ckpt-test-not-made").parallel_appends == 8


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_reads_bypass_the_page_cache_beside_a_cached_page(tmp_path: Path) -> None:
    """A read that bypasses the page cache still does so behind pages that an earlier read has left there."""
    chunk = 1 << 19
    data = np.random.default_rng(3).integers(0, 256, 48 << 20, np.uint8)
    store = LocalStore(tmp_path)
    store.put("a", data.data)
    file = tmp_path / "a"
    drop_cache(file)
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 1, 0)
    os.close(fd)
    assert is_cached(file, 0)
    assert not is_cached(file, 1 << 20)
    buffer = np.frombuffer(map_huge_pages(chunk), np.uint8)
    with store.open_once("a") as reader:
        for position in range(0, len(data), chunk):
            assert reader.read_into(position, buffer.data) == chunk
            assert np.array_equal(buffer, data[position : position + chunk])
    # A query for a page makes Linux read it. Where that read is slower than the query, one chunk goes through the page cache.
    assert len([p for p in range(chunk, len(data), chunk) if is_cached(file, p + chunk // 2)]) <= 2


READS = ("get", "open", "open_once", "descriptor", "exists")


@pytest.mark.parametrize("name", READS)
def test_the_main_thread_makes_no_call_to_a_folder_that_may_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Another thread makes it, so that Ctrl-C and the timeout work on a hung network mount."""
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    threads: list[threading.Thread] = []
    path = store._path
    monkeypatch.setattr(call_timeout, "can_block_on", lambda root: threading.current_thread() is not threading.main_thread())
    monkeypatch.setattr(store, "_path", lambda name: (threads.append(threading.current_thread()), path(name))[1])
    found = getattr(store, name)("a")
    assert threads
    assert threading.main_thread() not in threads
    if name == "descriptor":
        os.close(found)
    elif name.startswith("open"):
        found.close()
