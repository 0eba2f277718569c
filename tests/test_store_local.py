"""What a local directory promises beyond the contract: crashes, failing disks, odd file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import bypasses_cache, drop_cache, is_cached

from ckpt.storage.base.errors import AlreadyExists, NotFound, StoreError
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.base.huge_pages import map_huge_pages
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.writer import O_DIRECT
from ckpt.storage.testing import object_lengths, random_bytes, write_object
from ckpt.storage.urls import open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """With one object, so that the folder `a` is there already."""
    store = LocalStore(tmp_path / "store")
    store.put("a/kept", b"kept")
    return store


@pytest.fixture
def failpoints() -> Iterator[Callable[[str], None]]:
    yield set_failpoints
    set_failpoints("")


def files_below(store: LocalStore) -> set[str]:
    """Every file, the hidden ones too."""
    return {str(path.relative_to(store.root)) for path in Path(store.root).rglob("*") if path.is_file()}


# --- the page cache ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_what_is_opened_once_passes_the_page_cache_by(store: LocalStore) -> None:
    """And what is in there comes from there."""
    data = random_bytes(9 << 20)
    file = Path(store.root) / "b"
    file.write_bytes(data)
    memory = memoryview(map_huge_pages(8 << 20))
    drop_cache(file)
    if is_cached(file, 8 << 20):
        pytest.skip("a file system that is all in memory")

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


def test_a_prefetch_brings_just_what_it_names_into_the_page_cache(store: LocalStore) -> None:
    file = Path(store.root) / "b"
    file.write_bytes(random_bytes(9 << 20))
    drop_cache(file)
    if is_cached(file, 0):
        pytest.skip("a file system that is all in memory")
    store.prefetch("b", 3 << 20, 4 << 20)
    while not all(is_cached(file, position << 20) for position in (4, 5, 6)):
        time.sleep(0.01)
    assert not is_cached(file, 3 << 20)
    assert not is_cached(file, 8 << 20)


# --- crashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["local.append=kill@2", "local.fsync=kill@2", "local.rename=kill@1"])
def test_killed_writer_leaves_only_what_the_sweep_removes(store: LocalStore, point: str) -> None:
    program = (
        "import sys; from ckpt.storage.local.directory import LocalStore\n"
        "with LocalStore(sys.argv[1]).create('a/killed', 1 << 20) as writer:\n"
        "    for _ in range(3): writer.append(memoryview(bytes(8192)))\n"
        "    writer.commit()\n"
    )
    child = subprocess.run([sys.executable, "-c", program, store.root], env={**os.environ, "CKPT_FAILPOINTS": point})
    assert child.returncode == -9
    assert object_lengths(store) == {"a/kept": 4}
    assert not store.exists("a/killed")
    assert len(files_below(store)) == 2
    store.sweep_temporaries("")
    assert files_below(store) == {"a/kept"}


def test_sweep_keeps_to_its_folder_and_to_temporary_files(store: LocalStore) -> None:
    there = {"a/.x.0.ckpt-tmp", "b/.x.0.ckpt-tmp", "b/.hidden", "b/x.ckpt-tmp"}
    for name in there:
        path = Path(store.root, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    store.sweep_temporaries("b")
    assert files_below(store) == {"a/kept", "a/.x.0.ckpt-tmp", "b/.hidden", "b/x.ckpt-tmp"}


def test_order_of_a_publish(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are durable before the name is, and the name before the call returns."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(fd: int) -> None:
        done.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "fsync file")
        fsync(fd)

    def spy_replace(source: str, target: str) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_object(store, "a/w", b"x")
    assert done == ["fsync file", "rename", "fsync folder"]
    done.clear()
    store.put("a/p", b"x")
    assert done == ["fsync file", "rename", "fsync folder"]
    done.clear()
    store.put("new/folder/p", b"x")
    assert done == ["fsync folder"] * 2 + ["fsync file", "rename", "fsync folder"]


def test_a_folder_that_another_process_has_made_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one may not have come to its fsync yet, and may end before it does. Once for each folder."""
    subprocess.run([sys.executable, "-c", "import os, sys; os.makedirs(sys.argv[1])", tmp_path / "above/store/a/b"], check=True)
    done: list[str] = []
    fsync = os.fsync

    def spy_fsync(fd: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    store = LocalStore(tmp_path / "above/store")
    store.put("a/b/c", b"x")
    parents = [tmp_path, tmp_path / "above", tmp_path / "above/store", tmp_path / "above/store/a"]
    assert [found for found in done if found in map(str, parents)] == list(map(str, parents))
    done.clear()
    LocalStore(tmp_path / "above/store").put("a/b/d", b"x")
    assert done[:2] == [str(tmp_path / "above/store"), str(tmp_path / "above/store/a")], "what is above only once"
    done.clear()
    store.put("a/b/e", b"x")
    assert len(done) == 2, "the file and its folder"


def test_a_root_whose_parents_cannot_be_opened(tmp_path: Path) -> None:
    """As below a /home that this user may pass, and not list."""
    (tmp_path / "home/user").mkdir(parents=True)
    code = """
import os, sys
from ckpt.storage.local.directory import LocalStore
if os.getuid() == 0:
    os.setuid(65534)
LocalStore(sys.argv[1] + "/home/user").put("a/b", b"x")
"""
    (tmp_path / "home/user").chmod(0o777)
    (tmp_path / "home").chmod(0o711)
    parent = tmp_path
    while parent != parent.parent and not parent.stat().st_mode & 1:
        parent.chmod(parent.stat().st_mode | 0o11)
        parent = parent.parent
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


# --- failing disks ---------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[LocalStore, bytes], Any]] = {
    "put": lambda store, data: store.put("a/b", data),
    "put_new": lambda store, data: store.put_new("a/b", data),
    "writer": lambda store, data: write_object(store, "a/b", data),
}


@pytest.mark.parametrize("how", WRITES)
def test_failed_fsync_publishes_nothing(store: LocalStore, failpoints: Callable[[str], None], how: str) -> None:
    failpoints("local.fsync=error@1")
    with pytest.raises(StoreError, match="I/O error") as failure:
        WRITES[how](store, b"x")
    assert isinstance(failure.value.__cause__, OSError)
    assert files_below(store) == {"a/kept"}
    failpoints("")
    WRITES[how](store, b"x")
    assert store.get("a/b") == b"x"


@pytest.mark.parametrize("how", WRITES)
def test_failed_fsync_of_the_folder_is_told(store: LocalStore, failpoints: Callable[[str], None], how: str) -> None:
    """The object is whole, but its name may be lost with the power: the caller must not believe in it."""
    failpoints("local.fsync=error@2")
    with pytest.raises(StoreError, match="making durable"):
        WRITES[how](store, b"x")


@pytest.mark.parametrize("point", ["local.append=full", "local.rename=error", "local.append=error"])
def test_failed_writer_leaves_nothing(store: LocalStore, failpoints: Callable[[str], None], point: str) -> None:
    failpoints(point)
    with pytest.raises(StoreError, match="full" if "full" in point else "I/O error"):
        write_object(store, "a/b", b"x")
    assert files_below(store) == {"a/kept"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no mount(8) here")
    if mounted.returncode:
        pytest.skip(f"mount(8) is not permitted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("how", WRITES)
def test_full_disk(small_disk: Path, how: str) -> None:
    store = LocalStore(small_disk)
    store.put("a/kept", b"kept")
    with pytest.raises(StoreError, match="disk is full: free space"):
        WRITES[how](store, bytes(2 << 20))
    assert files_below(store) == {"a/kept"}
    WRITES[how](store, bytes(1 << 19))  # what the failure took is free again


def test_full_disk_is_found_when_space_is_reserved(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    with pytest.raises(StoreError, match="disk is full"):
        store.create("a/b", size_hint=2 << 20)
    assert files_below(store) == set()
    with store.create("a/b", size_hint=1 << 19) as writer:
        writer.append(memoryview(bytes(100)))
        writer.commit()
    store.put("c", bytes(1 << 19))  # the rest of the reservation was given back


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_permission_denied(open_folder: Path) -> None:
    """In a child that is not root, for root may do everything."""
    store = LocalStore(open_folder)
    store.put("closed/a", b"x")
    closed = Path(store.root, "closed")
    (closed / "a").chmod(0)
    closed.chmod(0o555)
    calls: list[Callable[[], Any]] = [
        lambda: store.put("closed/b", b"x"),
        lambda: store.put_new("closed/b", b"x"),
        lambda: store.create("closed/b"),
        lambda: store.get("closed/a"),
        lambda: store.open("closed/a"),
        lambda: store.delete(["closed/a"]),
    ]
    child = os.fork()
    if not child:
        told = 0
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            for call in calls:
                try:
                    call()
                except NotFound:
                    pass
                except StoreError as error:
                    told += "Permission denied; check the owner" in str(error)
        finally:
            os._exit(told)
    told = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    closed.chmod(0o755)
    assert told == len(calls)


# --- odd file systems ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_refused_o_direct_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems open with O_DIRECT and refuse the write."""
    store = LocalStore(tmp_path / "store")
    refused = []
    pwrite = os.pwrite

    def picky_pwrite(fd: int, data: memoryview, position: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT:
            refused.append(position)
            raise OSError(errno.EINVAL, "refused by the test")
        return pwrite(fd, data, position)

    monkeypatch.setattr(os, "pwrite", picky_pwrite)
    page = memoryview(mmap(-1, 8192))
    page[:] = random_bytes(8192)
    with store.create("a") as writer:
        positions = [writer.append(page) for _ in range(3)]
        assert writer.commit() == 3 * 8192
    assert positions == [0, 8192, 16384]
    assert store.get("a") == random_bytes(8192) * 3
    assert refused in ([0], []), "one refusal is enough"  # none where O_DIRECT cannot even be opened


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
@pytest.mark.parametrize("short", [512, 4096])
def test_short_direct_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    """A device may take a part only, and leave a position that O_DIRECT does not take."""
    store = LocalStore(tmp_path / "store")
    pwrite = os.pwrite
    calls = []

    def short_pwrite(fd: int, data: memoryview, position: int) -> int:
        calls.append(position)
        return pwrite(fd, data[:short] if len(calls) == 1 else data, position)

    monkeypatch.setattr(os, "pwrite", short_pwrite)
    page = memoryview(mmap(-1, 16384))
    page[:] = random_bytes(16384)
    with store.create("a") as writer:
        writer.append(page)
        writer.commit()
    assert store.get("a") == random_bytes(16384)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP])
def test_put_new_without_hard_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def no_link(source: str, target: str) -> None:
        raise OSError(error, "no hard links")

    monkeypatch.setattr(os, "link", no_link)
    store.put_new("a/b", b"first")
    with pytest.raises(AlreadyExists):
        store.put_new("a/b", b"second")
    assert store.get("a/b") == b"first"
    assert files_below(store) == {"a/kept", "a/b"}


def test_failed_rename_of_a_put_leaves_nothing(store: LocalStore) -> None:
    Path(store.root, "a/folder").mkdir()
    with pytest.raises(StoreError):
        store.put("a/folder", b"x")
    assert files_below(store) == {"a/kept"}


# --- names -----------------------------------------------------------------------------------------------------------


def test_symbolic_links_are_not_listed_and_are_replaced_not_followed(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_bytes(b"outside")
    for name, target in {"file": "file", "folder": "folder", "dangling": "none"}.items():
        os.symlink(outside / target, Path(store.root, "a", name))
    assert object_lengths(store) == {"a/kept": 4}
    assert list(store.list_folders("a")) == []
    store.put("a/file", b"inside")
    write_object(store, "a/dangling", b"inside")
    assert (outside / "file").read_bytes() == b"outside"
    assert not (outside / "none").exists()
    assert object_lengths(store) == {"a/kept": 4, "a/file": 6, "a/dangling": 6}
    os.symlink(outside / "file", Path(store.root, "a", "again"))
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
def test_any_path_can_be_a_root_and_comes_back_from_its_url(tmp_path: Path, folder: str) -> None:
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


def test_what_was_put_is_taken_at_once(store: LocalStore, failpoints: Callable[[str], None]) -> None:
    """Who waited for it has read it, and has deleted it with its folder, before the put is over: it was put."""
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


def raised(do: Callable[[], None]) -> list[BaseException]:
    try:
        do()
    except StoreError as error:
        return [error]
    return []


def test_a_disk_is_kept_busy_by_fewer_appends(tmp_path: Path) -> None:
    """A file system of the network, or in memory, has no device of its own."""
    there = LocalStore(tmp_path / "not" / "yet" / "made")
    assert there.parallel_appends == (4 if os.major(tmp_path.stat().st_dev) else 8)
    if not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    assert LocalStore("/dev/shm/ckpt-test-not-made").parallel_appends == 8


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_a_page_that_is_there_brings_no_others(tmp_path: Path) -> None:
    """What goes past the page cache goes on to do so behind what an earlier read has left in it."""
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
    # To ask for a page makes Linux read it: where that ends before the answer, one chunk comes through the page cache.
    assert len([p for p in range(chunk, len(data), chunk) if is_cached(file, p + chunk // 2)]) <= 2
