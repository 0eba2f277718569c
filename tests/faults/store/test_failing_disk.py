"""A local directory, and registers, on a disk that fails: full, without permission, without O_DIRECT, without hard links."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from helpers.local_stores import failpoints as failpoints
from helpers.local_stores import files_below
from helpers.local_stores import store as store
from helpers.small_disks import small_disk as small_disk

from ckpt.storage.base.errors import AlreadyExists, Changed, NotFound, Refused, StoreError, is_bad_sector, is_damage
from ckpt.storage.base.fd_io import convert_os_errors
from ckpt.storage.base.store import Buffer
from ckpt.storage.local.directory import LocalStore
from ckpt.storage.local.durable_writer import O_DIRECT
from ckpt.storage.registers.base import Register
from ckpt.storage.registers.sqlite import SqliteRegisters
from ckpt.storage.testing import object_lengths, random_bytes, write_object


@pytest.mark.parametrize("point", ["local.append=kill@2", "local.fsync=kill@2", "local.rename=kill@1"])
def test_a_killed_writer_leaves_only_temporary_files(store: LocalStore, point: str) -> None:
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


def test_a_publish_syncs_the_file_then_renames_it_then_syncs_the_folder(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are durable before the name, and the name before the call returns."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(fd: int) -> None:
        calls.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "fsync file")
        fsync(fd)

    def spy_replace(source: str, target: str) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write_object(store, "a/w", b"x")
    assert calls == ["fsync file", "rename", "fsync folder"]
    calls.clear()
    store.put("a/p", b"x")
    assert calls == ["fsync file", "rename", "fsync folder"]
    calls.clear()
    store.put("new/folder/p", b"x")
    assert calls == ["fsync folder"] * 2 + ["fsync file", "rename", "fsync folder"]


def test_a_folder_created_by_another_process_is_made_durable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process may end before its fsync. Each folder is synced only once."""
    subprocess.run([sys.executable, "-c", "import os, sys; os.makedirs(sys.argv[1])", tmp_path / "above/store/a/b"], check=True)
    synced: list[str] = []
    fsync = os.fsync

    def spy_fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    store = LocalStore(tmp_path / "above/store")
    store.put("a/b/c", b"x")
    parents = [tmp_path, tmp_path / "above", tmp_path / "above/store", tmp_path / "above/store/a"]
    assert [path for path in synced if path in map(str, parents)] == list(map(str, parents))
    synced.clear()
    LocalStore(tmp_path / "above/store").put("a/b/d", b"x")
    assert synced[:2] == [str(tmp_path / "above/store"), str(tmp_path / "above/store/a")], (
        "a folder above the store was synced twice"
    )
    synced.clear()
    store.put("a/b/e", b"x")
    assert len(synced) == 2, "only the file and its folder are synced"


def test_a_store_below_unreadable_folders_is_written() -> None:
    """A user may enter /home, but not list it. A folder of pytest may lose its mode when another run of pytest begins."""
    with tempfile.TemporaryDirectory(prefix="ckpt-test-") as folder:
        write_below_an_unreadable_folder(Path(folder))


def write_below_an_unreadable_folder(root: Path) -> None:
    (root / "home/user").mkdir(parents=True)
    code = """
import os, sys
from ckpt.storage.local.directory import LocalStore
if os.getuid() == 0:
    os.setuid(65534)
LocalStore(sys.argv[1] + "/home/user").put("a/b", b"x")
"""
    (root / "home/user").chmod(0o777)
    (root / "home").chmod(0o711)
    root.chmod(0o711)
    subprocess.run([sys.executable, "-c", code, root], check=True)
    assert (root / "home/user/a/b").read_bytes() == b"x"


WRITES: dict[str, Callable[[LocalStore, bytes], Any]] = {
    "put": lambda store, data: store.put("a/b", data),
    "put_new": lambda store, data: store.put_new("a/b", data),
    "writer": lambda store, data: write_object(store, "a/b", data),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_failed_fsync_publishes_nothing(store: LocalStore, failpoints: Callable[[str], None], how: str) -> None:
    failpoints("local.fsync=error@1")
    with pytest.raises(StoreError, match="I/O error") as failure:
        WRITES[how](store, b"x")
    assert isinstance(failure.value.__cause__, OSError)
    assert files_below(store) == {"a/kept"}
    failpoints("")
    WRITES[how](store, b"x")
    assert store.get("a/b") == b"x"


@pytest.mark.parametrize("how", WRITES)
def test_a_failed_fsync_of_the_folder_is_reported(store: LocalStore, failpoints: Callable[[str], None], how: str) -> None:
    """The object is whole, but its name may be lost with the power: the caller must not rely on it."""
    failpoints("local.fsync=error@2")
    with pytest.raises(StoreError, match="making durable"):
        WRITES[how](store, b"x")


@pytest.mark.parametrize("point", ["local.append=full", "local.rename=error", "local.append=error"])
def test_a_failed_writer_leaves_no_file(store: LocalStore, failpoints: Callable[[str], None], point: str) -> None:
    failpoints(point)
    with pytest.raises(StoreError, match="full" if "full" in point else "I/O error"):
        write_object(store, "a/b", b"x")
    assert files_below(store) == {"a/kept"}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_a_full_disk_fails_and_frees_its_space(small_disk: Path, how: str) -> None:
    store = LocalStore(small_disk)
    store.put("a/kept", b"kept")
    with pytest.raises(StoreError, match="disk is full: free space"):
        WRITES[how](store, bytes(2 << 20))
    assert files_below(store) == {"a/kept"}
    WRITES[how](store, bytes(1 << 19))  # the space of the failed write is free again


def test_a_full_disk_is_detected_when_space_is_reserved(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    with pytest.raises(StoreError, match="disk is full"):
        store.create("a/b", size_hint=2 << 20)
    assert files_below(store) == set()
    with store.create("a/b", size_hint=1 << 19) as writer:
        writer.append(memoryview(bytes(100)))
        writer.commit()
    store.put("c", bytes(1 << 19))  # the rest of the reservation was given back


@pytest.mark.parametrize("how", ["put", "put_new"])
def test_a_file_system_that_becomes_read_only_during_a_write_is_reported(small_disk: Path, how: str) -> None:
    """Ext4 does so after an I/O error. The temporary file can't be deleted then, which must not replace the error."""

    class StoppedStore(LocalStore):
        def _write_temporary(self, name: str, data: Buffer) -> tuple[str, str]:
            written = super()._write_temporary(name, data)
            subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
            return written

    with pytest.raises(Refused, match="publishing .*Read-only file system; mount the file system writable"):
        WRITES[how](StoppedStore(small_disk), b"x")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user can enter; the folders of pytest are closed to other users."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_each_call_without_permission_is_reported(open_folder: Path) -> None:
    """The calls run in a child that is not root, as root may do everything."""
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
        reported = 0
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
                    reported += "Permission denied; check its owner" in str(error)
        finally:
            os._exit(reported)
    reported = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    closed.chmod(0o755)
    assert reported == len(calls)


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
def test_a_refused_direct_write_falls_back_to_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems open a file with O_DIRECT and refuse the write."""
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
    assert refused in ([0], []), "more than one write was refused"  # none where open() refuses O_DIRECT already


@pytest.mark.skipif(not O_DIRECT, reason="no O_DIRECT on this system")
@pytest.mark.parametrize("short", [512, 4096])
def test_a_short_direct_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int) -> None:
    """A device may write only a part, and leave a position that O_DIRECT does not accept."""
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
def test_put_new_works_without_hard_links(store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def no_link(source: str, target: str) -> None:
        raise OSError(error, "no hard links")

    monkeypatch.setattr(os, "link", no_link)
    store.put_new("a/b", b"first")
    with pytest.raises(AlreadyExists):
        store.put_new("a/b", b"second")
    assert store.get("a/b") == b"first"
    assert files_below(store) == {"a/kept", "a/b"}


def test_a_stopped_writer_without_hard_links_deletes_nothing_of_its_successor(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped between the exclusive create and the rename, while a successor sweeps and publishes the same name."""

    def no_link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no hard links")

    def replace_later(source: str, target: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        successor = LocalStore(store.root)
        successor.sweep_temporaries("a")
        successor.revoke("a/b")
        successor.publish("a/b", b"new", lambda: None, successor.get_versioned("a/b", 100)[1])
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(os, "replace", replace_later)
    with pytest.raises(Changed):
        store.publish("a/b", b"old", lambda: None)
    assert store.get("a/b") == b"new"
    assert files_below(store) == {"a/kept", "a/b"}


def test_a_failed_rename_of_a_put_leaves_no_file(store: LocalStore) -> None:
    Path(store.root, "a/folder").mkdir()
    with pytest.raises(StoreError):
        store.put("a/folder", b"x")
    assert files_below(store) == {"a/kept"}


# --- registers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def unreadable_names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names that cannot be looked up (EIO), which many programs treat as if the file were absent."""
    names: set[str] = set()
    stat = os.stat

    def failing_stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str) and os.path.basename(path) in names:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", failing_stat)
    return names


def test_registers_that_cannot_be_looked_up_do_not_count_as_absent(tmp_path: Path, unreadable_names: set[str]) -> None:
    SqliteRegisters(str(tmp_path / "registers")).mark_complete()
    unreadable_names.add("registers")
    after = SqliteRegisters(str(tmp_path / "registers"))
    for call in (lambda: after.read(["a"]), lambda: list(after.scan("a"))):
        with pytest.raises(StoreError, match="looking up .*/registers failed: Input/output error"):
            call()
    unreadable_names.clear()
    assert after.read(["a"]) == [Register()]


def test_damaged_registers_are_set_aside_with_their_file_even_if_it_cannot_be_looked_up(
    tmp_path: Path, unreadable_names: set[str]
) -> None:
    """A file without its log would be registers that forgot promises."""
    registers = SqliteRegisters(str(tmp_path / "registers"))
    registers.mark_complete()
    registers.close()
    (tmp_path / "registers-wal").write_bytes(b"a log")
    unreadable_names.add("registers")
    registers.reset()
    assert not (tmp_path / "registers").exists()
    assert not (tmp_path / "registers-wal").exists()
    assert len(list(tmp_path.glob("registers.damaged-*"))) == 2


# --- what counts as damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENODATA])
def test_what_a_device_cannot_read_is_damage(number: int) -> None:
    """The kernel reports a bad medium, and a checksum of the device or of its file system that does not match, by these."""
    with pytest.raises(StoreError) as failure, convert_os_errors("reading", "a"):
        raise OSError(number, os.strerror(number))
    assert is_bad_sector(failure.value)
    assert is_damage(failure.value)


@pytest.mark.parametrize(
    "number",
    [errno.EACCES, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOENT],
)
def test_what_cannot_be_read_for_another_reason_is_no_damage(number: int) -> None:
    with pytest.raises(StoreError) as failure, convert_os_errors("reading", "a"):
        raise OSError(number, os.strerror(number))
    assert not is_damage(failure.value)
